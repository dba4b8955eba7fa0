"""Shards written from arrays come back as these arrays, and are damaged on demand; given batches come as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import testing
from loaderd.errors import CorruptRecordError, OptionError

RNG = np.random.default_rng(0)
ARRAYS = {
    "board": RNG.random((50, 3, 3, 5)) < 0.5,
    "move": RNG.integers(-(1 << 63), (1 << 63) - 1, (50, 4)),
    "score": RNG.random(50, dtype=np.float32),
    "policy": RNG.random((50, 7)).astype(np.float16),
    "image": RNG.integers(0, 256, (50, 4, 4), np.uint8),
    "number": np.arange(50),
}


@pytest.mark.parametrize("compression", ["none", "gzip", "zlib"])
def test_arrays_come_back_as_they_were(tmp_path: Path, compression: Any):
    paths = testing.write_shards(tmp_path / "new", ARRAYS, num_shards=3, compression=compression)
    assert [path.name for path in paths] == ["00000.tfrecord", "00001.tfrecord", "00002.tfrecord"]
    with loaderd.Loader(paths, testing.schema_of(ARRAYS), batch_size=50, workers=1) as loader:
        (batch,) = loader
        order = batch["number"]
        assert sorted(order) == list(range(50)) and list(order) != list(range(50))
        for name, array in ARRAYS.items():
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array[order])


@pytest.mark.parametrize("how", ["data", "length", "cut"])
def test_a_damaged_record_is_the_one_that_is_found(tmp_path: Path, how: Any):
    (path,) = testing.write_shards(tmp_path, ARRAYS)
    offset = testing.damage(path, record=20, how=how)
    with (
        pytest.raises(CorruptRecordError) as raised,
        loaderd.Loader(path, testing.schema_of(ARRAYS), batch_size=10, workers=1) as loader,
    ):
        next(iter(loader))
    (found,) = raised.value.damages
    assert (found.shard, found.record, found.offset) == (str(path), 20, offset)


def test_what_cannot_be_written_or_damaged_is_refused(tmp_path: Path):
    with pytest.raises(OptionError, match=r"as many records each.*'b': 2"):
        testing.write_shards(tmp_path, {"a": np.zeros(3), "b": np.zeros(2)})
    with pytest.raises(OptionError, match="fixed size"):
        testing.write_shards(tmp_path, {"a": np.array([None, "x"])})
    for records, said in [
        (["abc"], r"records\[0\] must be bytes, got 'abc'"),
        ([b"abc", 5], r"records\[1\] must be bytes, got 5"),
        (b"abc", "records must be a dict of arrays, or a list of bytes, got b'abc'"),
        (5, "records must be .*, got 5"),
        ({"a": [[1], [1, 2]]}, r"records\['a'\] must be an array, got \[\[1\], .*\nnumpy says: .*inhomogeneous"),
        ({"\udc80": np.zeros(3)}, r"each name of records must be text that is valid Unicode, got '\\udc80'"),
        ({3: np.zeros(3)}, "each name of records must be .*, got 3"),
    ]:
        with pytest.raises(OptionError, match=said):
            testing.write_shards(tmp_path / "none", records)  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()
    with pytest.raises(OptionError, match="compression must be"):
        testing.write_shards(tmp_path, ARRAYS, compression="xz")  # type: ignore[arg-type]
    (path,) = testing.write_shards(tmp_path, [b"one", b"", b"three"])
    with pytest.raises(OptionError, match="It has 3"):
        testing.damage(path, record=3)
    assert testing.damage(path, record=1) == 19
    (path,) = testing.write_shards(tmp_path, [b"one"], compression="gzip")
    with pytest.raises(OptionError, match="is compressed"):
        testing.damage(path)


def test_old_shards_are_overwritten_or_refused_but_never_left_beside_new_ones(tmp_path: Path):
    for records in (b"old", b"newer"):
        testing.write_shards(tmp_path, [records] * 3, num_shards=3)
    (tmp_path / "other.tfrecord").touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OptionError, match=f"got {tmp_path}, which holds 00001.tfrecord\nGive another folder, or"):
        testing.write_shards(tmp_path, [b"newest"])
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(testing.write_shards(tmp_path, [b"newest"] * 4, num_shards=4)) == 4


@pytest.mark.one_variant
@pytest.mark.parametrize("dtype", [">f4", ">i8", "<u2", ">c8", ">f8", "S3", "bool"])
def test_arrays_of_any_byte_order_come_in_the_native_one(dtype: str, tmp_path: Path):
    array = np.arange(4).astype(dtype)
    paths = testing.write_shards(tmp_path, {"x": array})
    schema = testing.schema_of({"x": array})
    with loaderd.Loader(paths, schema, batch_size=4, shuffle=False, workers=1) as loader:
        (delivered,) = loader
        assert delivered["x"].dtype.isnative and np.array_equal(delivered["x"], array)
