"""Passes over shards as tasks: what they find, and that a loader finds what they leave."""

from __future__ import annotations

import pytest

import loaderd

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


def test_a_cache_that_cannot_be_kept_is_an_error(cluster, shards, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(loaderd.errors.OptionError, match="cannot be kept"):
        loaderd_ray.index([str(path) for path in shards], index_cache=tmp_path / "file")
    with pytest.raises(loaderd.errors.OptionError, match="a folder that all nodes share"):
        loaderd_ray.index([str(path) for path in shards])
