"""A tar of games, and tables, in a bucket that fails now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distant_s3 import ENVIRONMENT, DistantS3

import loaderd
from tests.helpers.fixed_files import SCHEMA, records_from, wrapped

COUNT = 900
OPTIONS: dict[str, Any] = {
    "batch_size": 30,
    "shuffle": loaderd.Shuffle(window_records=200, block_records=16),
    "seed": 5,
    "workers": 2,
}
KINDS = ("tar", "npz", "parquet", "arrow")


def numbers_of(batch: Any) -> list[int]:
    """Of a batch whose values are those of its numbers."""
    chosen = records_from(0, COUNT)[batch["number"]]
    assert (batch["values"] == chosen["values"]).all()
    return [int(number) for number in batch["number"]]


@pytest.fixture
def one(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """One shard with all records."""
    path = tmp_path / f"records.{request.param}"
    path.write_bytes(wrapped(records_from(0, COUNT), request.param))
    return path


@pytest.fixture
def planned(one: Path) -> list[list[int]]:
    with loaderd.Loader(one, SCHEMA, **OPTIONS) as loader:
        batches = [numbers_of(batch) for batch in loader]
    everything = [number for batch in batches for number in batch]
    assert sorted(everything) == list(range(COUNT)) != everything
    return batches


@pytest.mark.one_variant
@pytest.mark.parametrize("one", KINDS, indirect=True)
def test_in_a_bucket_that_fails_now_and_then(one: Path, planned: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with DistantS3(failing=0.05) as store:
        store.put(one.name, one.read_bytes())
        with loaderd.Loader(store.uri("records.*"), SCHEMA, **OPTIONS) as loader:
            found = []
            for batch in loader:
                found.append(numbers_of(batch))
                if len(found) == 10:
                    there = loader.position
            statistics = loader.statistics()
        assert found == planned and statistics.storage.requests > 2 and statistics.damages == ()
        with loaderd.Loader(store.uri("records.*"), SCHEMA, start=there, **OPTIONS) as loader:
            assert [numbers_of(batch) for batch in loader] == planned[10:]
