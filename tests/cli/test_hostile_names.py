"""Names from outside, of files, features and members of a tar, on a terminal: none of them can do anything there."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import loaderd
from loaderd import testing
from loaderd.cli.status import Answers, screen
from loaderd.errors import LoaderdError, ServerError
from tests.helpers import commands
from tests.helpers.record_bytes import field, varint

EVIL = "\x1b[2J\x9b31m\u202e\r\nforged: all is well\u2028" + os.fsdecode(b"\xff")


def check(text: str) -> None:
    """Nothing that a terminal obeys, and no line that a name has begun."""
    assert text
    assert not [each for each in text if not (each.isprintable() or each == "\n")], ascii(text)
    assert not [line for line in text.split("\n") if line.startswith("forged")], text


def run(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    done = commands.run(*arguments, folder=folder)
    assert "Traceback" not in done.stderr
    check(done.stdout + done.stderr)
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a shard that has a damage, whose records have a feature of that name."""
    value = field(0x0A, field(0x0A, EVIL[:-1].encode()) + field(0x12, field(0x1A, field(0x0A, varint(7)))))
    (path,) = testing.write_shards(tmp_path, [field(0x0A, value)] * 3)
    testing.damage(path, record=1)
    path.rename(tmp_path / f"{EVIL}.tfrecord")
    (tmp_path / "mine.py").write_text("import loaderd\nschema = loaderd.Schema.of_stored({'n': loaderd.Int64()})")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "*.tfrecord"],
        ["verify", "*.tfrecord", "--json"],
        ["index", "*.tfrecord"],
        ["index", "*.tfrecord", "--index-cache", "/dev/null/x"],
        ["inspect", "*.tfrecord"],
        ["inspect", "*.tfrecord", "--features"],
        ["inspect", "*.tfrecord", "--record", "0"],
        ["inspect", "*.tfrecord", "--record", "1"],
        ["inspect", "*.tfrecord", "--json"],
        ["inspect", "*.tfrecord", "--schema", "mine:schema"],
        ["convert", "*.tfrecord", "--to", "to"],
        ["convert", "*.tfrecord", "--to", "to", "--schema", "mine:schema"],
        ["convert", "*.tfrecord", "--to", "to", "--schema", "mine:schema", "--on-corrupt", "skip_record"],
        ["doctor", "*.tfrecord", "--schema", "mine:schema"],
        ["verify", EVIL],
        ["verify", f"--{EVIL}"],
        [EVIL],
        ["doctor", EVIL],
        ["serve", EVIL],
        ["bench", EVIL],
    ],
    ids=lambda arguments: " ".join(arguments).encode("unicode_escape").decode()[:60],
)
def test_a_command(folder: Path, arguments: list[str]):
    run(folder, *[str(next(folder.glob(each))) if each.startswith("*.") else each for each in arguments])


def test_a_proposed_schema_is_the_one_that_is_meant(folder: Path):
    module = run(folder, "inspect", next(folder.glob("*.tfrecord")), "--features").stdout
    names: dict[str, Any] = {}
    exec(module, names)
    assert list(names["schema"].features) == [EVIL[:-1]]


def test_members_of_a_tar_and_arrays_of_an_npz(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in (f"{EVIL}.txt", f"{EVIL}.gz"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
    np.savez(tmp_path / "x.npz", **{EVIL[:-1]: np.zeros((4, 3), "u1")})
    (tmp_path / "mine.py").write_text(
        "import loaderd\nschema = loaderd.Schema.of_stored(loaderd.FixedRecords([('n', '<i4')]))"
    )
    for command in (["verify"], ["inspect"], ["index"], ["convert", "--to", "to"]):
        for shard, schema in (("x.tar", ["--schema", "mine:schema"]), ("x.npz", [])):
            run(tmp_path, *command, shard, *schema)


def test_the_errors_of_a_loader(folder: Path):
    """As Python prints them where nobody catches them; and what it logs."""
    schema = loaderd.Schema.of_stored({"n": loaderd.Int64()})
    for shards in (str(next(folder.glob("*.tfrecord"))), str(folder / EVIL)):
        with pytest.raises(LoaderdError) as caught, loaderd.Loader(shards, schema, batch_size=1) as loader:
            next(iter(loader))
        check(str(caught.value))
        assert "forged" in str(caught.value)
    code = "import logging, sys, loaderd.client.loader; logging.getLogger('loaderd').warning('of %s', sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, EVIL], capture_output=True, text=True, check=True)
    check(done.stderr)
    assert "forged" in done.stderr


def test_who_watches_a_training_of_that_name(tmp_path: Path):
    (path,) = testing.write_shards(tmp_path, {"id": np.arange(640), "bits": np.zeros((640, 32), bool)})
    path.rename(tmp_path / EVIL)
    program = Path(__file__).with_name("watched_training.py")
    command = [sys.executable, str(program), EVIL, "0.01", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
        assert training.stdout is not None and training.stdout.readline() == b"begun\n"
        for arguments in (["top", "--once", training.pid], ["doctor", training.pid]):
            assert "\\x1b[2J" in run(tmp_path, *arguments).stdout
        training.communicate()


def test_what_a_server_says():
    """Its address may be one of a server of somebody else's."""
    consumer = {"number": 1, "name": EVIL, "pid": 7, "dataset": EVIL, "state": EVIL}
    reader = {"name": EVIL, "host": EVIL, "process": EVIL, "rank": EVIL, "dataset": EVIL}
    reader |= {"records": 1, "bytes": 1, "seen": 0.0}
    dataset = {"name": EVIL, "state": f"failed: {EVIL}", "num_shards": 1, "num_records": 1, "fields": {EVIL: EVIL}}
    report = {"version": EVIL, "pid": 7, "started_s": 0.0, "datasets": [dataset]}
    of_unix = {**report, "workers": 1, "workers_restarted": 0, "memory_bytes": 0, "consumers": [consumer]}
    answers = {f"unix:{EVIL}": of_unix, f"http:{EVIL}": {**report, "consumers": [reader]}}
    now = Answers(1.0, answers, {"a": ServerError(EVIL)})
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(now, now))
    assert isinstance(console.file, io.StringIO)
    check(console.file.getvalue())
    assert console.file.getvalue().count("all is well") > 4
