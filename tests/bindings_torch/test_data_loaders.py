"""A loader behind PyTorch's DataLoader, and behind torchdata's, which can be resumed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import OptionError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
loaderd_torch = pytest.importorskip("loaderd_torch")
DataLoader = torch.utils.data.DataLoader

BATCH_SIZE, NUM_BATCHES, RECORDS = 16, 10, 150


@pytest.fixture
def loader(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
) -> Iterator[loaderd.Loader]:
    with loaderd.Loader(write_numbered([100, 50]), numbered_schema, batch_size=BATCH_SIZE, workers=1) as loader:
        yield loader


def taken(elements: Any) -> list[list[int]]:
    return [ids.tolist() for _, ids in elements]


def test_a_data_loader_hands_batches_on(loader: loaderd.Loader, recwarn: pytest.WarningsRecorder):
    expected = taken(loaderd_torch.batches(loader, ("bits", "id")))
    loader.load_state_dict(loaderd.Position())
    data_loader = DataLoader(loaderd_torch.batches(loader, ("bits", "id")), batch_size=None, num_workers=0)
    assert len(data_loader) == NUM_BATCHES
    assert taken(data_loader) == expected
    assert sorted(number for ids in taken(data_loader) for number in ids) == list(range(RECORDS)), "another epoch"
    bits, ids = next(iter(data_loader))
    assert bits.shape == (BATCH_SIZE, 32) and ids.dtype == torch.int64
    assert loader.statistics().batches_copied == 0 and not recwarn.list


def test_one_that_would_batch_again_is_refused(loader: loaderd.Loader):
    for options in ({}, {"batch_size": 4}):
        data_loader = DataLoader(loaderd_torch.batches(loader), **options)
        with pytest.raises(OptionError, match="batch_size of the DataLoader must be None") as caught:
            next(iter(data_loader))
        assert "batch_size=None, num_workers=0" in caught.value.hint
    assert loader.position == loader.next_position(), "nothing was taken"


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_one_with_workers_is_refused(loader: loaderd.Loader, start: str):
    data_loader = DataLoader(
        loaderd_torch.batches(loader), batch_size=None, num_workers=1, multiprocessing_context=start
    )
    with pytest.raises(OptionError, match="num_workers of the DataLoader must be 0"):
        next(iter(data_loader))
    assert len(taken(loaderd_torch.batches(loader, ("bits", "id")))) == NUM_BATCHES, "the loader is as it was"


def test_a_loader_and_its_batches_have_no_numbers(loader: loaderd.Loader):
    """As a DataLoader of the loader itself would have them, and ``random_split``."""
    with pytest.raises(
        TypeError, match=r"a Loader gives batches in their order, .* got \[0\]\nIterate .* DataLoader\("
    ):
        next(iter(DataLoader(loader, batch_size=None)))
    part, _ = torch.utils.data.random_split(loaderd_torch.batches(loader), [1, NUM_BATCHES - 1])
    with pytest.raises(TypeError, match=r"batches in their order, .*\n.*Dataset\(shards, schema\).split\(0.9, 0.1\)"):
        part[0]
    assert loader.position == loader.next_position(), "nothing was taken"


def test_batches_cannot_be_copied(loader: loaderd.Loader):
    for copy_or_pickle in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(OptionError, match=r"^loaderd_torch.batches cannot be pickled, nor copied"):
            copy_or_pickle(loaderd_torch.batches(loader))


def test_torchdata_goes_on_from_every_step(loader: loaderd.Loader):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def stateful() -> Any:
        batches = loaderd_torch.batches(loader, ("bits", "id"))
        return torchdata.StatefulDataLoader(batches, batch_size=None, num_workers=0)

    before, states, expected = stateful(), [], []
    for _ in range(2):
        for _, ids in before:
            expected.append(ids.tolist())
            states.append((len(expected), before.state_dict()))
        states.append((len(expected), before.state_dict()))  # behind the loop, where it says that it has ended
    for step, state in states:
        if step == 2 * NUM_BATCHES:
            break
        again = stateful()
        again.load_state_dict(state)
        assert len(again) == NUM_BATCHES
        assert taken(again) == expected[step : step + NUM_BATCHES - step % NUM_BATCHES]
