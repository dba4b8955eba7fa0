"""Which shards a process of the network server has open, and for how many consumers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.errors import OptionError
from loaderd.remote.tables import shard_hash
from loaderd.remote.tickets import RowsTicket
from loaderd.serve import datasets
from loaderd.serve.datasets import OtherData, ServedDataset, ServedListing
from loaderd.serve.opening import IndexedShards


@pytest.fixture
def dataset(write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema) -> loaderd.Dataset:
    return loaderd.Dataset(list(map(str, write_numbered([10] * 6))), numbered_schema)


@pytest.fixture
def served(dataset: loaderd.Dataset) -> ServedDataset:
    return ServedDataset("train", "m:train", dataset, ThreadPoolExecutor(2), None)


def earlier(dataset: loaderd.Dataset, number: int) -> list[tuple[str, bytes]]:
    """(digest, hashes of its shards) of data sets of some of the shards."""
    found = []
    for chosen in list(combinations(range(6), 3))[:number]:
        opened = IndexedShards(
            dataset, "train", choose=lambda listed, chosen=chosen: [[listed[0][n] for n in chosen]]
        )  # type: ignore[misc]
        found.append((ServedListing(dataset, opened).digest, b"".join(map(shard_hash, opened.sets[0]))))
    return found


def ticket(digest: str) -> RowsTicket:
    return RowsTicket(digest, np.array([[0, 0, 0, 1]]))


def test_shards_of_many_trainings_stay_open(dataset: loaderd.Dataset, served: ServedDataset):
    """Of too many, those are closed that nobody has read for longest."""
    many = earlier(dataset, 18)

    async def read() -> None:
        await served.open_current()
        for digest, shards in many[:16]:
            await served.add(digest, shards)
        first = [await served.of_ticket(ticket(digest)) for digest, _ in many[:16]]
        again = [await served.of_ticket(ticket(digest)) for digest, _ in many[:16]]
        assert all(one is other for one, other in zip(first, again, strict=True))
        for digest, shards in many[16:]:
            await served.add(digest, shards)
        for digest, _ in many[:2]:
            with pytest.raises(OtherData):
                await served.of_ticket(ticket(digest))
        for digest, _ in many[2:]:
            assert (await served.of_ticket(ticket(digest))).digest == digest

    asyncio.run(read())


def test_no_rows_of_other_shards_are_sent(
    dataset: loaderd.Dataset, served: ServedDataset, monkeypatch: pytest.MonkeyPatch
):
    """Behind a digest that could not be opened were once the shards of now."""
    monkeypatch.setattr(datasets, "_FAILED_FOR_S", -1.0)

    async def read() -> None:
        await served.open_current()
        ((_, shards),) = earlier(dataset, 1)
        with pytest.raises(OtherData):
            await served.add("of-others", shards)
        with pytest.raises(OtherData):
            await served.of_ticket(ticket("of-others"))

    asyncio.run(read())


def test_a_listing_anew_closes_the_one_before(dataset: loaderd.Dataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "_LISTED_ANEW_S", -1.0)
    growing = loaderd.Dataset(dataset.shards, dataset.schema, refresh="epoch")
    served = ServedDataset("train", "m:train", growing, ThreadPoolExecutor(2), None)

    async def read() -> list[int]:
        await served.open_current()
        num_open = []
        for _ in range(6):
            listing = await served.of_position(None, {})
            asked = RowsTicket(listing.digest, np.array([[0, 0, 0, 1]]), listing.opened.data.listing)
            (await served.of_ticket(asked)).make(asked, lambda: None)
            num_open.append(len(os.listdir("/proc/self/fd")))
        return num_open

    num_open = asyncio.run(read())
    assert len(set(num_open)) == 1, num_open


def test_what_cannot_be_opened_closes_nothing_else(dataset: loaderd.Dataset, served: ServedDataset):
    async def read() -> None:
        await served.open_current()
        ((digest, shards),) = earlier(dataset, 1)
        await served.add(digest, shards)
        for number in range(40):
            with pytest.raises(OtherData):
                await served.add(f"invented-{number}", shards)
        assert (await served.of_ticket(ticket(digest))).digest == digest

    asyncio.run(read())


def test_the_epochs_of_a_ticket_are_drawn_while_somebody_waits(dataset: loaderd.Dataset):
    """A ticket may name very many: not in the event loop, and no longer than the answer may take."""
    dataset = replace(dataset, sample=0.5)
    served = ServedListing(dataset, IndexedShards(dataset, "train"))
    ticket = RowsTicket(served.digest, np.array([[epoch, 0, 0, 1 << 40] for epoch in range(8)]))
    with pytest.raises(OptionError, match="at most"):
        served.check_size(ticket)
    (drawing,) = served.opened.data.drawings
    assert drawing is not None and drawing.circle.cache_info().misses == 0

    def gone() -> None:
        if drawing.circle.cache_info().misses == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        served.make(ticket, gone)
