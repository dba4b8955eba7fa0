"""Passes over shards as tasks: what they find, and that a loader finds what they leave."""

from __future__ import annotations

import gzip

import numpy as np
import pyarrow.fs
import pytest

import loaderd
from loaderd.schemas.leela import RECORD_V6

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

import loaderd_ray


@pytest.fixture
def shards(write_numbered):
    """Ten, of which the third has a damaged record."""
    paths = write_numbered([100] * 10, "many")
    data = bytearray(paths[2].read_bytes())
    data[len(data) // 2] ^= 1
    paths[2].write_bytes(data)
    return paths


def test_verify_names_each_damage(cluster, shards):
    found = loaderd_ray.verify([str(path) for path in shards])
    assert (found.num_shards, found.num_records) == (10, 999)
    (damage,) = found.damages
    assert damage.shard == str(shards[2]) and 0 < damage.record < 100


def test_a_loader_finds_the_indexes(cluster, shards, numbered_schema, tmp_path):
    dataset = loaderd.Dataset(
        str(shards[0].parent / "*.tfrecord"),
        numbered_schema,
        loaderd.Shuffle(window_records=200, block_records=16),
        on_corrupt="skip_record",
        index_cache=str(tmp_path / "cache"),
    )
    first = loaderd_ray.index(dataset)
    again = loaderd_ray.index(dataset)
    assert (first.num_cached, again.num_cached) == (0, 10)
    assert first.num_records == again.num_records == 999 and first.damages == again.damages
    with loaderd.Loader(dataset, batch_size=64) as loader:
        assert loader.statistics().index_cached == 10
        assert sum(len(batch["id"]) for batch in loader) == 999


def test_shards_where_only_the_data_sets_storage_leads(cluster, shards, numbered_schema, tmp_path):
    folder = pyarrow.fs.SubTreeFileSystem(str(shards[0].parents[1]), pyarrow.fs.LocalFileSystem())
    storage = loaderd.Storage(filesystem=folder)
    dataset = loaderd.Dataset(
        "own://many/*.tfrecord", numbered_schema, storage=storage, index_cache=str(tmp_path / "cache")
    )
    assert loaderd_ray.verify(dataset).num_records == loaderd_ray.index(dataset).num_records == 999
    assert loaderd_ray.index(dataset).num_cached == 10


def test_a_cache_that_cannot_be_kept_is_an_error(cluster, shards, numbered_schema, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(loaderd.errors.OptionError, match="cannot be kept"):
        loaderd_ray.index([str(path) for path in shards], index_cache=tmp_path / "file")
    with pytest.raises(loaderd.errors.OptionError, match="a folder that all nodes share"):
        loaderd_ray.index([str(path) for path in shards])
    with pytest.raises(loaderd.errors.OptionError, match=r"a folder that all nodes share.*got 'user'"):
        loaderd_ray.index(loaderd.Dataset(shards, numbered_schema))


def test_records_of_fixed_size(cluster, tmp_path):
    """Told by the data set's schema, by a schema that is given, and by what the shards hold."""
    games = np.zeros(30, RECORD_V6)
    games["version"], games["input_format"] = 6, 1
    for number in range(3):
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(games.tobytes()))
    (tmp_path / "2.gz").write_bytes(gzip.compress(games.tobytes()[:-1]))
    schema, cache = loaderd.schemas.lc0(), str(tmp_path / "cache")
    dataset = loaderd.Dataset(str(tmp_path / "*.gz"), schema, on_corrupt="skip_record", index_cache=cache)
    assert loaderd_ray.index(dataset).num_cached == 0
    again = loaderd_ray.index(str(tmp_path / "*.gz"), schema=schema, index_cache=cache)
    assert (again.num_cached, again.num_records, len(again.damages)) == (3, 89, 1)
    told = loaderd_ray.verify(str(tmp_path / "*.gz"))
    assert (told.num_cached, told.num_records, told.damages) == (0, 89, again.damages)
    with loaderd.Loader(dataset, batch_size=89, workers=1) as loader:
        assert loader.statistics().index_cached == 3
        assert [len(batch["policy"]) for batch in loader] == [89]
