"""Headroom: a training takes the same batches from memory, again and again, and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.errors import ClosedError, OptionError


@pytest.fixture
def loader(write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema) -> loaderd.Loader:
    return loaderd.Loader(write_numbered([200]), numbered_schema, batch_size=10, shuffle=False, epochs=1, workers=1)


def test_the_first_batches_come_again_and_again(loader: loaderd.Loader):
    with loader:
        loader.headroom(3)
        firsts = [int(batch["id"][0]) for batch in loader]
        assert firsts == ([0, 10, 20] * 7)[:20], "as many as an epoch has"
        assert loader.statistics().batches_delivered == 3
        assert (loader.position.epoch, loader.position.batch) == (1, 0)
        loader.headroom(0)
        assert [int(batch["id"][0]) for batch in loader] == list(range(0, 200, 10))


def test_the_data_go_on_where_they_would_be(loader: loaderd.Loader):
    with loader:
        iterator = iter(loader)
        next(iterator)
        loader.headroom(2)
        assert [int(next(iterator)["id"][0]) for _ in range(5)] == [10, 20, 20, 10, 20]
        loader.headroom(0)
        assert int(next(iterator)["id"][0]) == 60


def test_what_is_repeated_is_no_memory_that_workers_write_to(loader: loaderd.Loader):
    with loader:
        loader.headroom(1)
        first, second = (batch for batch, _ in zip(loader, range(2), strict=False))
        np.testing.assert_array_equal(first["bits"], second["bits"])
        for name in ("id", "bits"):
            array = second.writable(name)
            assert array is not None and array.__array_interface__["data"][0] % 64 == 0
            array += 1
        assert next(iter(loader))["id"].tolist() == list(range(10)), "as TensorFlow and PyTorch may write there"
        assert loader.statistics().slots_lent == 1, "of the first alone"


def test_a_closed_loader_repeats_nothing(loader: loaderd.Loader):
    loader.headroom(1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.close()
    with pytest.raises(ClosedError):
        next(iterator)


@pytest.mark.one_variant
@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_what_is_no_number_of_batches(loader: loaderd.Loader, wrong: object):
    with loader, pytest.raises(OptionError, match="batches must be a number of batches, or 0"):
        loader.headroom(wrong)  # type: ignore[arg-type]
