"""Every candidate delivers exactly what was written.

Each runs in a process of its own, as it does when measured; but most of those of tf.data here, to import it once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from candidates import _records, tfdata_parse, tfdata_tuned, tfdata_xla
from harness import reference
from harness.digest import Digest
from harness.interface import Config, configure, load, why_not
from harness.measured import FIRST_BATCH, digest
from harness.run_candidate import CandidateError, LeftOut, run_candidate
from harness.synthetic import shard_records, write_shards

RECORDS, SHARDS = 2_000, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    paths = write_shards(tmp_path_factory.mktemp("shards"), RECORDS, num_shards=SHARDS)
    return Config(tuple(map(str, paths)), batch_size=128, epochs=1)


def written(config: Config) -> dict[str, int]:
    """The digest of the records that were written, decoded by the reference."""
    found = Digest()
    for shard in range(SHARDS):
        for stored, scores in shard_records(shard, RECORDS, SHARDS, seed=0):
            decoded = reference.decode_chess(stored, scores, config.dtype)
            found = found.updated(config.delivered(), {"d": stored, "s": scores} if config.packed else decoded)
    return asdict(found)


def delivered(spec: str, config: Config) -> Any:
    try:
        return run_candidate(spec, config, None, timeout_s=60)["digest"]
    except LeftOut as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "spec",
    [
        # TensorFlow is imported anew in their processes, which takes longer than all the others.
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tfdata_expert", "tfdata_service", "mp_queue")),
        "torch_dataloader",
        "grain_loader",
        "spdl_pipeline",
        "spdl_pipeline:int8",
        "spdl_checked",
        "lczero",
    ],
)
def test_it_delivers_what_was_written(spec: str, config: Config) -> None:
    assert delivered(spec, config) == written(configure(spec, config)[1])


@pytest.mark.slow  # TensorFlow is imported anew for each
@pytest.mark.parametrize(
    "spec",
    [
        *("tfdata_tuned", "loaderd_batches", "tfdata_seed", "tfdata_batched:int8", "tfdata_expert:int8,noshuffle"),
        *("tfdata_xla", "tfdata_parse:packed"),
    ],
)
def test_tfdata_delivers_what_was_written(spec: str, config: Config) -> None:
    name, configured = configure(spec, config)
    assert digest(load(name).steps(configured), configured.delivered()) == written(configured)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "compiles"), [("loaderd_python", True), ("loaderd_python:numpy", False)])
def test_loaderd_unpacks_with_and_without_a_compiler(spec: str, compiles: bool, config: Config) -> None:
    result = run_candidate(spec, config, None, timeout_s=60)
    assert result["digest"] == written(config)
    assert ("llvmlite" in result["versions"]) == compiles


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["lczero:int8,noshuffle", "spdl_checked:noshuffle"])
def test_it_reads_compressed_shards(spec: str, config: Config, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, RECORDS, num_shards=SHARDS, compression="GZIP")
    compressed = replace(config, shards=tuple(map(str, paths)), compression="GZIP")
    assert delivered(spec, compressed) == written(configure(spec, compressed)[1])


@pytest.mark.parametrize("spec", ["lczero", "torch_dataloader"])
def test_fewer_shards_than_workers_are_read_for_ever(spec: str, config: Config) -> None:
    few = replace(config, shards=config.shards[:1], epochs=None, workers=3, batch_size=500, window_records=100)
    try:
        assert run_candidate(spec, few, FIRST_BATCH, timeout_s=60)["examples"] == 500
    except LeftOut as reason:
        pytest.skip(str(reason))


def test_no_worker_is_without_a_shard(config: Config) -> None:
    endless = replace(config, epochs=None, workers=5)
    assert _records.workers_of(endless) == SHARDS
    assert list(_records.paths(endless, worker=4, num_workers=5)) == [], "it has none, and does not wait for one"


def test_an_empty_shard_has_no_rows(config: Config, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with_empty = replace(config, shards=(config.shards[0], str(tmp_path / "empty")), batch_size=1_000)
    (rows,) = _records.batches(with_empty)
    assert len(rows) == RECORDS // SHARDS


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("tfdata_parse", "give it the option packed"),
        ("tfdata_expert:packed", "fields of the chess record"),
        ("lczero:packed", "fields of the chess record"),
    ],
)
def test_it_says_what_it_cannot_deliver(spec: str, reason: str, config: Config) -> None:
    name, configured = configure(spec, config)
    assert reason in (why_not(load(name), configured) or "")
    assert why_not(load(name), replace(configured, packed=not configured.packed)) is None


_CLOSING = """
import multiprocessing.resource_tracker, os, sys, time
from harness.interface import Config, load
from harness.process_tree import process_tree

def others():  # but for Python's own tracker, which ends with this process
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    return [pid for pid in process_tree(os.getpid())[1:] if pid != tracker]

stream = load(sys.argv[1]).steps(Config(tuple(sys.argv[2:]), batch_size=64))
for _ in range(3):
    next(stream)
assert len(others()) == 2, others()
stream.close()
until_s = time.monotonic() + 30
while others() and time.monotonic() < until_s:
    time.sleep(0.01)  # what close() has had to kill may need a moment
print(others())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lczero", "mp_queue", "grain_loader", "torch_dataloader"])
def test_no_process_is_left_when_it_is_closed(name: str, config: Config) -> None:
    if name in ("grain_loader", "torch_dataloader"):
        pytest.importorskip(name.split("_")[0])
    command = [sys.executable, "-c", _CLOSING, name, *config.shards]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "[]\n", done.stderr


def test_only_what_checks_crcs_finds_a_changed_bit(config: Config, tmp_path: Path) -> None:
    data = bytearray(Path(config.shards[0]).read_bytes())
    data[100] ^= 1  # in the first record's board
    damaged = tmp_path / "damaged.tfrecord"
    damaged.write_bytes(data)
    one = replace(config, shards=(str(damaged),))
    pytest.importorskip("spdl.pipeline")
    assert delivered("spdl_pipeline", one)["rows"] == RECORDS // SHARDS
    with pytest.raises(CandidateError, match="record 0 is damaged"):
        run_candidate("spdl_checked", one, None, timeout_s=60)


_SCHEMA = """
import loaderd

schema = loaderd.Schema(
    features={
        "packed": loaderd.PackedBits(50),
        "raw": loaderd.Raw(">i2", (3,)),
        "pair": loaderd.Int64((2,), default=7),
        "weight": loaderd.Float(),
    },
    fields={
        "planes": loaderd.Bits("packed", (3, 4, 3), 5, channel_order=(2, 0, 1), scale=(1, -2, 3), dtype="int8"),
        "flag": loaderd.Bits("packed", start=41, dtype="bool"),
        "little": loaderd.Bits("packed", (2, 5), 11, channel_order=(4, 1, 0, 3, 2), bit_order="little"),
        "raw": loaderd.Array("raw", dtype="float32", scale=0.5, offset=1.0),
        "pair": loaderd.Array("pair", dtype="int32", scale=3, shape=(2, 1)),
        "sum": loaderd.Derived(lambda raw, weight: raw.sum(axis=1) * weight, ("raw", "weight")),
    },
    intermediates={"weight": loaderd.Array("weight")},
)
others = loaderd.Schema(
    features=schema.features,
    fields={
        "filled": loaderd.Fill(1, (2, 2)),
        "spread": loaderd.Spread("weight", (2, 2)),
        "joined": loaderd.Planes((loaderd.Fill(1, (1, 2)), loaderd.Fill(2, (1, 2)))),
        "padded": loaderd.Bits("packed", (3, 9), plane_bytes=2),
        "second": loaderd.Derived(lambda one: one + 1, ("one",)),
        "plain": loaderd.Bits("packed", (3, 9)),
    },
    intermediates={"one": loaderd.Array("raw", shape=(), first=1)},
)
"""


def _examples(rng: np.random.Generator) -> Iterator[bytes]:
    for number in range(20):
        feature = {
            "packed": tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(7)])),
            "raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(6)])),
            "weight": tf.train.Feature(float_list=tf.train.FloatList(value=[rng.random()])),
        }
        if number % 2:
            feature["pair"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[number, -number]))
        yield tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ``schema`` and ``others`` are; by another name for each test, as it stays imported."""
    name = "schema_of_" + "".join(filter(str.isalnum, request.node.name))
    (tmp_path / f"{name}.py").write_text(_SCHEMA)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("candidate", [tfdata_tuned, tfdata_xla])
def test_tfdata_leaves_out_what_it_does_not_decode(candidate: Any, module: str) -> None:
    reason = "it does not decode Fill, Spread, Planes, Bits with plane_bytes, Array with first"
    assert why_not(candidate, Config((), schema=f"{module}:others")) == reason
    assert why_not(candidate, Config((), schema=f"{module}:others", packed=True)) is None
    assert why_not(candidate, Config((), schema=f"{module}:schema")) is None


def test_tfdata_leaves_out_what_it_does_not_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "import loaderd\n"
    dtypes = {"text": "S16", "pairs": [("x", "<f4"), ("y", "i1")], "large": "<u8", "swapped": ">u2"}
    for name, dtype in dtypes.items():
        module += f'{name} = loaderd.Schema({{"r": loaderd.Raw({dtype!r})}}, {{"r": loaderd.Array("r")}})\n'
    (tmp_path / "not_parsed.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    for candidate, packed in product((tfdata_tuned, tfdata_xla, tfdata_parse), (False, True)):
        if packed or candidate is not tfdata_parse:
            for name in ("text", "pairs", "large"):
                reason = why_not(candidate, Config((), schema=f"not_parsed:{name}", packed=packed))
                assert str(reason).startswith("it does not parse Raw of "), (candidate, name)
            assert why_not(candidate, Config((), schema="not_parsed:swapped", packed=packed)) is None


@pytest.mark.slow
@pytest.mark.parametrize("candidate", [tfdata_tuned, tfdata_xla])
def test_tfdata_decodes_other_records(candidate: Any, module: str, tmp_path: Path) -> None:
    records = list(_examples(np.random.default_rng(0)))
    with tf.io.TFRecordWriter(str(tmp_path / "shard")) as writer:
        for record in records:
            writer.write(record)

    config = Config((str(tmp_path / "shard"),), batch_size=20, epochs=1, shuffle=False, schema=f"{module}:schema")
    (step,) = candidate.steps(config)
    schema = config.delivered()
    expected = reference.decode(schema, reference.parse(schema, records))
    assert list(step.batch) == list(expected)
    for field, array in expected.items():
        assert step.batch[field].dtype.as_numpy_dtype == array.dtype
        np.testing.assert_array_equal(step.batch[field].numpy(), array, err_msg=field)
