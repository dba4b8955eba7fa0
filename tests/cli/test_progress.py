"""What takes long says so to a log within some seconds: commands, a server and a loader at a shard of a terabyte."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from loaderd import testing
from tests.helpers.commands import COMMAND

DATASETS = """\
import loaderd
schema = loaderd.Schema({"x": loaderd.PackedBits(8)}, {"x": loaderd.Bits("x", shape=(8,))})
train = loaderd.Dataset("*.tfrecord", schema, index_cache="none")
"""
LOADER = [sys.executable, "-c", "import loaderd, datasets; loaderd.Loader(datasets.train, batch_size=2)"]
KEPT = ["--index-cache", "none"]
MEASURE = ["--schema", "datasets:schema", "--batch-size", "10", "--seconds", "60"]
RUNS = {
    "loader": (LOADER, "indexing shards"),
    "serve": ([COMMAND, "serve", "datasets:train", "--unix", "socket"], "train: indexing shards"),
    "verify": ([COMMAND, "verify", "hole.tfrecord"], "checking shards"),
    "index": ([COMMAND, "index", "hole.tfrecord", *KEPT], "indexing shards"),
    "convert": ([COMMAND, "convert", "hole.tfrecord", "--schema", "chess_eval", "--to", "to"], "reading the sources"),
    "inspect": ([COMMAND, "inspect", "hole.tfrecord"], "reading the shard"),
    "doctor": ([COMMAND, "doctor", "small/*.tfrecord", *MEASURE], "measuring how fast the shards load"),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("name", RUNS)
def test_a_log_hears_within_some_seconds_how_far_it_is(name: str, tmp_path: Path):
    hole = tmp_path / "hole.tfrecord"
    testing.write_shards(tmp_path, [b"x"])[0].rename(hole)
    os.truncate(hole, 1 << 40)  # to read it would take an hour
    rows = {"x": [bytes([number]) for number in np.arange(100)]}
    testing.write_shards(tmp_path / "small", rows)
    (tmp_path / "datasets.py").write_text(DATASETS)
    command, doing = RUNS[name]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if doing in line), "")
        took_s = time.monotonic() - began_s
        process.terminate()
    how_far = r": (\d of \d shards, )?\d+\.\d\d of 1099.51 GB, about \d|. This takes 60 s"
    assert re.search(rf"{doing} for [56] s({how_far})", line), line
    assert took_s >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "inspect", "convert"])
def test_storage_that_does_not_answer_is_named_long_before_it_is_given_up(command: str, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        uri = f"s3://a:secret@bucket/x?endpoint_override={host}&scheme=http&region=x"
        options = ["--to", str(tmp_path / "out")] if command == "convert" else []
        with subprocess.Popen([COMMAND, command, uri, *options], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.kill()
    assert line.startswith("listing s3://***@bucket/x?") and " for 5 s. No answer from the storage for 5 s" in line
    assert f"Asked is {host}, with the key in the URI; it is given up after 90 s" in line and "secret" not in line
