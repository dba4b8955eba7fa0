"""A large compressed shard: shuffled in blocks, resumed anywhere, shared by hosts, with workers that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.testing import schema_of, write_shards
from tests.helpers.own_processes import kill, newest_daemon, workers_of

NUM = 24_000
SHUFFLE = loaderd.Shuffle(window_records=4000)
OPTIONS: dict[str, Any] = {"batch_size": 500, "epochs": 1, "workers": 2, "shuffle": SHUFFLE}

Shard = tuple[list[Path], loaderd.Schema]


@pytest.fixture(scope="module", params=["gzip", "zlib"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """8 MB inflated."""
    rng = np.random.default_rng(0)
    arrays = {"number": np.arange(NUM), "bits": rng.random((NUM, 2400)) < 0.1}
    folder = tmp_path_factory.mktemp("large")
    return write_shards(folder, arrays, compression=request.param), schema_of(arrays)


def numbers_of(loader: loaderd.Loader, most: int = 1 << 30) -> list[int]:
    numbers: list[int] = []
    for batch in loader:
        numbers += batch["number"].tolist()
        if len(numbers) >= most:
            break
    return numbers


def test_it_is_shuffled_resumed_and_shared(shard: Shard):
    paths, schema = shard
    with loaderd.Loader(paths, schema, **OPTIONS) as loader:
        order = numbers_of(loader)
    assert sorted(order) == list(range(NUM))
    firsts = {min(order[at : at + 4000]) for at in range(0, NUM, 4000)}
    assert len(firsts) == 6 and firsts != set(range(0, NUM, 4000)), "blocks of some 6,000 records in another order"
    with loaderd.Loader(paths, schema, **OPTIONS) as loader:
        begun = numbers_of(loader, 9000)
        position = loader.position
    with loaderd.Loader(paths, schema, **OPTIONS) as loader:
        loader.load_state_dict(position)
        assert begun + numbers_of(loader) == order
    shares = []
    for host in range(2):
        with loaderd.Loader(paths, schema, **OPTIONS, shard=(host, 2)) as loader:
            shares.append(numbers_of(loader))
    assert sorted(shares[0] + shares[1]) == list(range(NUM)) and min(map(len, shares)) >= NUM // 2 - 500


def test_a_worker_that_is_killed_costs_no_record(shard: Shard):
    paths, schema = shard
    with loaderd.Loader(paths, schema, **OPTIONS) as loader:
        batches = iter(loader)
        numbers = next(batches)["number"].tolist()
        kill(workers_of(newest_daemon())[0])
        for batch in batches:
            numbers += batch["number"].tolist()
    assert sorted(numbers) == list(range(NUM))
