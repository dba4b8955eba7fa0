"""Shards of every kind become shards of every other, and a loader delivers the very same batches from both."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import testing
from loaderd.convert import shard_job, shard_writers
from loaderd.convert.conversion import LOCK, lock_folder
from loaderd.convert.row_source import RowSource
from loaderd.convert.work_units import plan_units, spans_of
from loaderd.errors import CorruptRecordError, OptionError, RecordMismatchError, ShardReadError
from loaderd.formats.indexer import make_index
from loaderd.schemas import kata
from loaderd.storage.files import list_shards
from loaderd.storage.local_file import LocalFile
from tests.helpers.fixed_files import SCHEMA, WRAPPINGS, records_from, wrapped

RNG = np.random.default_rng(0)
ARRAYS = {
    "number": np.arange(500),
    "board": RNG.random((500, 3, 5)) < 0.5,  # 15 bits
    "score": RNG.random((500, 2), np.float32),
    "far": RNG.integers(-(1 << 62), 1 << 62, (500, 3)),
    "policy": RNG.random((500, 7)).astype("<f2"),
    "name": np.array([f"game-{number % 70}".encode() for number in range(500)]),
}


def convert_here(sources: Any, schema: loaderd.Schema, folder: Path, **options: Any) -> list[Any]:
    """What the command does in its processes, in this one; returns the shards that were not there."""
    files = list_shards(sources)
    indexes = [make_index(file, schema.records, 64) for file in files]
    units = list(plan_units(indexes, options.get("records_per_shard", 130)))
    job = shard_job.ShardJob(
        tuple(files),
        tuple(index.compression for index in indexes),
        schema.records or dict(schema.features),
        folder,
        sum(len(unit.sizes) for unit in units),
        options.get("format", "tfrecord"),
        options.get("compression", "none"),
        options.get("skips", False),
    )
    with lock_folder(job):
        return [
            shard
            for tasks in shard_job.tasks_of(job, units)
            for task in tasks
            for shard in shard_job.do_task(job, task)
            if not shard.was_there
        ]


def batches_of(shards: Any, schema: loaderd.Schema) -> list[dict[str, Any]]:
    with loaderd.Loader(shards, schema, batch_size=64, shuffle=False, workers=1, index_cache="none") as loader:
        return [{name: values.copy() for name, values in batch.items()} for batch in loader]


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) > 1
    for first, second in zip(one, other, strict=True):
        assert list(first) == list(second)
        for name in first:
            assert first[name].dtype == second[name].dtype and first[name].shape == second[name].shape
            assert first[name].tobytes() == second[name].tobytes(), name


def converted(schema: loaderd.Schema, format: str) -> loaderd.Schema:
    return schema.as_examples() if format == "tfrecord" else schema.as_records()


@pytest.mark.one_variant
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_records_of_fixed_size_become_tfrecord(wrapping: str, tmp_path: Path):
    for number in range(3):
        (tmp_path / f"{number}.source").write_bytes(wrapped(records_from(150 * number, 150), wrapping))
    written = convert_here(tmp_path / "*.source", SCHEMA, tmp_path / "to", compression="gzip")
    assert [one.records for one in written] == [130, 130, 130, 60]
    shards = tmp_path / "to" / "*.tfrecord.gz"
    assert_same(batches_of(tmp_path / "*.source", SCHEMA), batches_of(shards, SCHEMA.as_examples()))


@pytest.mark.one_variant
@pytest.mark.parametrize("compression", ["none", "gzip", "zlib"])
@pytest.mark.parametrize("format", ["tfrecord", "npz", "records"])
def test_tfrecord_becomes_any_of_the_three(compression: Any, format: str, tmp_path: Path):
    schema = testing.schema_of(ARRAYS)
    paths = testing.write_shards(tmp_path / "from", ARRAYS, num_shards=2, compression=compression)
    packed = "none" if compression == "none" else "gzip"
    convert_here(paths, schema, tmp_path / "to", format=format, compression=packed)
    shards = tmp_path / "to" / "shard-*"
    assert_same(batches_of(paths, schema), batches_of(shards, converted(schema, format)))
    if format == "npz":
        for first, path in zip(range(0, 500, 130), sorted((tmp_path / "to").glob("*.npz")), strict=True):
            with np.load(path) as arrays:
                assert (arrays["far"] == ARRAYS["far"][first : first + 130]).all()
                bits = np.unpackbits(arrays["board"], axis=1)[:, :15].reshape(-1, 3, 5)
                assert (bits == ARRAYS["board"][first : first + 130]).all()


@pytest.mark.parametrize("format", ["npz", "records"])
def test_bits_of_which_a_value_is_expected(format: str, tmp_path: Path):
    """They are bytes in what is written, and stood there as a number."""
    dtype = np.dtype([("mask", ">u2", (2,)), ("number", "<i4")])
    stored = np.zeros(300, dtype)
    stored["mask"], stored["number"] = 258, np.arange(300)
    (tmp_path / "a").write_bytes(stored.tobytes())
    fields = {"mask": loaderd.Bits("mask", (32,)), "number": loaderd.Array("number")}
    schema = loaderd.Schema(loaderd.FixedRecords(dtype, ["mask"], {"mask": 258}), fields)
    convert_here(tmp_path / "a", schema, tmp_path / "to", format=format)
    shards = tmp_path / "to" / "shard-*"
    assert_same(batches_of(tmp_path / "a", schema), batches_of(shards, schema.as_records()))
    assert schema.as_records().records.expect == {"mask": [1, 2, 1, 2]}


def test_there_and_back_again(tmp_path: Path):
    """The digests of the shards are those of their records, whatever they are written as."""
    schema = testing.schema_of(ARRAYS)
    digests, shards = [], testing.write_shards(tmp_path / "0", ARRAYS)
    for number, format in enumerate(["npz", "tfrecord", "records", "tfrecord"], 1):
        written = convert_here(shards, schema, tmp_path / f"{number}", format=format)
        digests.append([one.digest for one in written])
        shards, schema = list((tmp_path / f"{number}").glob("shard-*")), converted(schema, format)
    assert len(digests[0]) == len(set(digests[0])) == 4
    assert all(each == digests[0] for each in digests)
    assert_same(batches_of(shards, schema), batches_of(tmp_path / "0" / "*", testing.schema_of(ARRAYS)))


def test_rows_of_katago(tmp_path: Path):
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 256, (2, 150, kata.rows(9).itemsize), np.uint8).view(kata.rows(9))[..., 0]
    for number, each in enumerate(rows):
        for name in ("globalInputNC", "globalTargetsNC"):
            each[name] = rng.random(each[name].shape)  # any bytes may be a NaN, of which there are several
        np.savez_compressed(tmp_path / f"{number}.npz", **{name: each[name] for name in each.dtype.names or ()})
    schema = loaderd.schemas.katago(9)
    convert_here(tmp_path / "*.npz", schema, tmp_path / "to", compression="zlib")
    assert_same(batches_of(tmp_path / "*.npz", schema), batches_of(tmp_path / "to" / "*.zz", schema.as_examples()))


def test_a_plain_source_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reader.read does so twice: to find the anchors that hold, and to scan what is between them."""
    paths = testing.write_shards(tmp_path / "from", ARRAYS)
    schema, (index,) = testing.schema_of(ARRAYS), [make_index(file, None, 64) for file in list_shards(paths)]
    read_bytes, real = 0, LocalFile.read_at

    def read_at(file: LocalFile, offset: int, view: memoryview) -> int:
        nonlocal read_bytes
        read_bytes += (done := real(file, offset, view))
        return done

    monkeypatch.setattr(LocalFile, "read_at", read_at)
    with closing(RowSource(schema, [index.file], ["none"])) as source:
        assert sum(map(len, source.read(list(spans_of(0, index))))) == 500
    assert read_bytes == paths[0].stat().st_size


# ------------------------------------------------------------------------------------------- what is not right


def test_shards_that_are_there_are_not_written_again_and_what_lacks_is(tmp_path: Path):
    paths = testing.write_shards(tmp_path / "from", ARRAYS, compression="gzip")
    schema, folder = testing.schema_of(ARRAYS), tmp_path / "to"
    first = convert_here(paths, schema, folder)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("shard*")}
    assert convert_here(paths, schema, folder) == []
    names = sorted(before)
    (folder / names[1]).unlink()
    (folder / f".{names[2]}.1.tmp").touch()
    again = convert_here(paths, schema, folder)
    assert again == [first[1]]
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("shard*")}
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    assert all(after[name] == before[name] for name in names if name != names[1])
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("format", ["tfrecord", "records", "npz"])
def test_dtypes_that_are_not_numpys(format: str, name: str, tmp_path: Path):
    """npz does not know them: ``loaderd convert`` refuses it."""
    dtype = loaderd.Raw(name).dtype
    np.arange(0, 300).astype(dtype).tofile(tmp_path / "from")
    schema = loaderd.Schema.of_stored(loaderd.FixedRecords([("half", dtype)]))
    if format == "npz":
        with pytest.raises(OptionError, match=f"npz cannot hold feature 'half'.* call its {name} '<"):
            shard_writers.check_format(schema.features, format)
        return
    convert_here(tmp_path / "from", schema, tmp_path / "to", format=format)
    assert_same(batches_of(tmp_path / "from", schema), batches_of(tmp_path / "to/*", converted(schema, format)))


@pytest.mark.parametrize("change", ["records", "damaged", "cut", "link", "link to its records", "pipe"])
def test_a_shard_that_is_there_and_holds_anything_else_is_refused_and_stays(change: str, tmp_path: Path):
    """Whoever made it, as the same command over other sources, or somebody who can write to the folder."""
    arrays = {name: ARRAYS[name] for name in ("number", "score")}
    paths = testing.write_shards(tmp_path / "from", arrays)
    schema, folder = testing.schema_of(arrays), tmp_path / "to"
    convert_here(paths, schema, folder)
    shard = folder / "shard-00001-of-00004.tfrecord"
    content = bytearray(shard.read_bytes())
    if change == "records":
        paths = testing.write_shards(tmp_path / "other", {**arrays, "number": np.arange(1, 501)})
    elif change == "damaged":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif change == "cut":
        shard.write_bytes(content[:-1])
    elif change == "link to its records":
        shard.symlink_to(shard.rename(tmp_path / "moved"))
    else:
        shard.unlink()
        os.mkfifo(shard) if change == "pipe" else shard.symlink_to(tmp_path / "nothing")
    before = {path: path.lstat() for path in folder.iterdir()}
    with pytest.raises(OptionError, match=r"holds another conversion: shard-0000[01].* should hold 130 records"):
        convert_here(paths, schema, folder)
    after = {path: path.lstat() for path in folder.iterdir()}
    assert [(path, was.st_ino, was.st_mtime_ns) for path, was in before.items()] == [
        (path, now.st_ino, now.st_mtime_ns) for path, now in after.items()
    ]


@pytest.mark.parametrize("format", ["tfrecord", "npz", "records"])
def test_a_shard_that_is_not_as_it_was_written_gets_no_name(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One bit of it is turned between the last write and the first read, as by memory or a disk that fails."""
    paths = testing.write_shards(tmp_path / "from", ARRAYS)
    real = shard_job._read_back

    def damaged(path: Path, *others: Any) -> Any:
        data = bytearray(path.read_bytes())
        data[2 * len(data) // 3] ^= 1
        path.write_bytes(data)
        return real(path, *others)

    monkeypatch.setattr(shard_job, "_read_back", damaged)
    with pytest.raises(ShardReadError, match="expected 130 records of digest"):
        convert_here(paths, testing.schema_of(ARRAYS), tmp_path / "to", format=format)
    assert [path.name for path in (tmp_path / "to").iterdir()] == [LOCK]


def test_an_encoder_that_errs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The CRCs are right, the record is another."""
    real = shard_writers.encode_examples

    def wrong(rows: Any, features: Any) -> Any:
        rows = rows.copy()
        rows["number"][-1] += 1
        return real(rows, features)

    monkeypatch.setattr(shard_writers, "encode_examples", wrong)
    paths = testing.write_shards(tmp_path / "from", ARRAYS)
    with pytest.raises(ShardReadError, match=r"as were written, found \(130, "):
        convert_here(paths, testing.schema_of(ARRAYS), tmp_path / "to")


def test_records_that_do_not_fit_are_named_or_left_out(tmp_path: Path):
    """Of every kind: of another version, of another length, damaged since it was indexed."""
    records = records_from(0, 300)
    records["version"][[5, 200]] = 4
    (tmp_path / "records").write_bytes(records.tobytes())
    at = f"record 5 at byte {5 * records.itemsize}"
    with pytest.raises(RecordMismatchError, match=f"{at}: expected version 3, found version 4"):
        convert_here(tmp_path / "records", SCHEMA, tmp_path / "a")
    written = convert_here(tmp_path / "records", SCHEMA, tmp_path / "b", skips=True)
    assert [(one.records, one.left_out) for one in written] == [(129, 1), (129, 1), (40, 0)]
    numbers = np.concatenate([batch["number"] for batch in batches_of(tmp_path / "b" / "*", SCHEMA.as_examples())])
    assert numbers.tolist() == [number for number in range(300) if number not in (5, 200)]


def test_damage_that_appears_after_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    schema = testing.schema_of(ARRAYS)
    (path,) = testing.write_shards(tmp_path / "from", ARRAYS)
    real, status = make_index, path.stat()

    def index_then_damage(*arguments: Any) -> Any:
        index = real(*arguments)
        if arguments[0].uri == str(path):
            testing.damage(path, record=7)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return index

    monkeypatch.setitem(globals(), "make_index", index_then_damage)
    with pytest.raises(CorruptRecordError, match="record 7 at byte"):
        convert_here(path, schema, tmp_path / "a")
    path.write_bytes(testing.write_shards(tmp_path / "again", ARRAYS)[0].read_bytes())
    status = path.stat()
    written = convert_here(path, schema, tmp_path / "b", skips=True)
    assert (written[0].records, written[0].left_out) == (129, 1)
