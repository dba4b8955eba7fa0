"""Shards written from arrays come back as these arrays, and are damaged where it was asked for."""

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
    with pytest.raises(OptionError, match="compression must be"):
        testing.write_shards(tmp_path, ARRAYS, compression="xz")  # type: ignore[arg-type]
    (path,) = testing.write_shards(tmp_path, [b"one", b"", b"three"])
    with pytest.raises(OptionError, match="It has 3"):
        testing.damage(path, record=3)
    assert testing.damage(path, record=1) == 19
    (path,) = testing.write_shards(tmp_path, [b"one"], compression="gzip")
    with pytest.raises(OptionError, match="is compressed"):
        testing.damage(path)
