"""A tar of games and an npz of rows: in a bucket, and whoever reads them killed in the middle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from distant_s3 import ENVIRONMENT, DistantS3

import loaderd
from tests.helpers.fixed_files import SCHEMA, records_from, wrapped
from tests.helpers.own_processes import DAEMON, children_of, kill, workers_of
from tests.helpers.serving import wait_until

COUNT = 900
OPTIONS: dict[str, Any] = {
    "batch_size": 30,
    "shuffle": loaderd.Shuffle(window_records=200, block_records=16),
    "seed": 5,
    "workers": 2,
}
KINDS = ("tar", "npz")


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


# ------------------------------------------------------------------------------------------------- far away


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


# ---------------------------------------------------------------------------------------------------- killed


def processes(who: str) -> list[int]:
    """Of this program's loader; none, if a daemon that was killed has not been missed yet."""
    daemons = children_of(os.getpid(), DAEMON)
    return daemons if who == "daemon" else [pid for daemon in daemons for pid in workers_of(daemon)]


def restarts_of(loader: loaderd.Loader, who: str) -> int:
    statistics = loader.statistics()
    return statistics.daemon_restarts if who == "daemon" else statistics.workers_restarted


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "daemon"])
@pytest.mark.parametrize("one", KINDS, indirect=True)
def test_a_process_that_is_killed_in_the_middle_loses_nothing(one: Path, planned: list[list[int]], who: str):
    with loaderd.Loader(one, SCHEMA, **OPTIONS) as loader:
        found = []
        for batch in loader:
            found.append(numbers_of(batch))
            if len(found) in (2, 9, 17):
                kill(*processes(who)[:1])
        assert found == planned
        # The consumer hears of it with a batch, which may be of the next pass.
        wait_until(lambda: next(iter(loader)) and restarts_of(loader, who) > 0)
        assert loader.statistics().damages == ()


@pytest.mark.slow
@pytest.mark.parametrize("one", KINDS, indirect=True)
def test_a_position_in_the_middle_is_gone_on_from(one: Path, planned: list[list[int]]):
    with loaderd.Loader(one, SCHEMA, **OPTIONS) as loader:
        batches = iter(loader)
        positions = []
        for _ in range(len(planned)):
            positions.append(loader.position)
            next(batches)
    for step in (7, len(planned) - 1):
        with loaderd.Loader(one, SCHEMA, start=positions[step], **{**OPTIONS, "workers": 1}) as loader:
            assert [numbers_of(batch) for batch in loader] == planned[step:], step
