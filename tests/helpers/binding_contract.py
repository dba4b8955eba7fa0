"""What ``batches`` of loaderd_tf, loaderd_torch and loaderd_jax promise alike.

A module of tests has a class that inherits these tests, and the fixtures ``binding``, ``loader`` and ``shards`` (of
``lent_batches``). The schema has the fields "bits" (the 32 bits of a record's number), "id" (the number), and others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import ClosedError, OptionError
from tests.helpers import slots
from tests.helpers.lent_batches import BATCH_SIZE, HELD, NUM_BATCHES, RECORDS
from tests.helpers.own_processes import seen_of_newest


@dataclass(frozen=True)
class Binding:
    """One library. ``tensor`` is an array of its own."""

    batches: Callable[..., Any]
    address: Callable[[Any], int]
    """Of a tensor's first byte."""
    to_numpy: Callable[[Any], Any]
    dtype_of: Callable[[np.dtype[Any]], Any]
    """The library's dtype for one of numpy's."""
    aliased: set[str]
    """The fields that are not copied."""
    host: Any
    device: Any
    """One to which batches are copied."""
    has_values: bool
    """Whether tensors on that device have values."""
    wrong_devices: Sequence[tuple[Any, str]]
    """And what is said of each."""
    settle: Callable[[], object] = lambda: None
    """Has the library give back what nobody refers to any more."""
    saved: Callable[[Any, Path], Any] = lambda state, folder: state
    """A state that went through a checkpoint of the library's."""

    def lies_in_a_slot(self, tensor: Any) -> bool:
        return slots.lies_in_a_slot(self.address(tensor))

    def check(self, bits: Any, ids: Any) -> list[int]:
        """That all rows are whole; returns their numbers."""
        numbers: list[int] = self.to_numpy(ids).tolist()
        assert np.array_equal(self.to_numpy(bits) @ 2.0 ** np.arange(31, -1, -1), numbers)
        return numbers


class BatchesContract:
    def test_every_dtype_is_what_the_loader_has(self, binding: Binding, loader: loaderd.Loader):
        batches = binding.batches(loader)
        assert len(batches) == NUM_BATCHES
        assert repr(batches).startswith("<batches of <Loader of ")
        elements = [
            {
                name: (tensor.dtype, tuple(tensor.shape), np.array(binding.to_numpy(tensor)))
                for name, tensor in one.items()
            }
            for one in batches
        ]
        loader.load_state_dict(loaderd.Position())
        for element, batch in zip(elements, loader, strict=True):
            assert list(element) == list(loader.schema.fields)
            for name, array in batch.items():
                dtype, shape, values = element[name]
                assert dtype == binding.dtype_of(array.dtype) and shape == array.shape
                assert np.array_equal(values.astype(array.dtype), array), name
        assert element["id"][1] == (6,)
        del batch, array

    def test_numbers_are_not_copied(self, binding: Binding, loader: loaderd.Loader):
        element = next(iter(binding.batches(loader)))
        assert {name for name, tensor in element.items() if binding.lies_in_a_slot(tensor)} >= binding.aliased
        assert all(binding.address(element[name]) % 64 == 0 for name in binding.aliased)

    def test_mistakes(self, binding: Binding, loader: loaderd.Loader):
        for arguments, message in (
            ({"structure": ("id", "absent")}, "'absent'"),
            ({"structure": ()}, "structure must be made of the fields"),
            ({"prefetch": -1}, "prefetch must be a number of batches, 0 or more, got -1"),
            ({"prefetch": 3}, "prefetch must be left out where there is no device=, got 3"),
            ({"loader": "a path"}, "loader must be a loaderd.Loader"),
            *(({"device": device}, message) for device, message in binding.wrong_devices),
        ):
            with pytest.raises(OptionError, match=message):
                binding.batches(**{"loader": loader, **arguments})

    def test_no_batch_is_overwritten_while_it_lives(self, binding: Binding, loader: loaderd.Loader):
        """The first is kept, and every second one, and of some a row alone."""
        for device in (None, binding.device) if binding.has_values else (None,):
            before = loader.statistics().batches_copied
            kept, rows = [], []
            for _ in range(5):
                for number, (bits, ids) in enumerate(binding.batches(loader, ("bits", "id"), device=device)):
                    if number % 2 == 0:
                        kept.append(((bits, ids), binding.check(bits, ids)))
                    elif number % 3 == 0:
                        rows.append((bits[3:4], ids[3:4]))
            assert len(kept) == 25 and all(binding.check(*element) == numbers for element, numbers in kept)
            assert len(rows) == 10 and all(binding.check(*row) for row in rows)
            del bits, ids
            binding.settle()
            assert loader.statistics().slots_lent <= HELD
            assert loader.statistics().batches_copied > before + 15, "what was kept took all that may be held"
            del kept, rows

    def test_an_iteration_goes_on_from_every_step(self, binding: Binding, loader: loaderd.Loader, shards: list[Path]):
        """Of another loader, as in a program that was started again. What was copied ahead does not count."""
        device = binding.device if binding.has_values else binding.host
        batches = binding.batches(loader, ("bits", "id"), device=device, prefetch=3)
        states, expected = [batches.state_dict()], []
        for _ in range(2):
            for bits, ids in batches:
                expected.append(binding.check(bits, ids))
                states.append(batches.state_dict())
        del bits, ids
        assert expected[:NUM_BATCHES] != expected[NUM_BATCHES:], "each iteration is a pass of its own"
        for numbers in (expected[:NUM_BATCHES], expected[NUM_BATCHES:]):
            assert sorted(chain(*numbers)) == [*range(RECORDS)]
        with loaderd.Loader(shards, loader.schema, batch_size=BATCH_SIZE, workers=2) as another:
            again = binding.batches(another, ("bits", "id"))
            for step, state in enumerate(binding.saved(states, shards[0].parent)[:-1]):
                again.load_state_dict(state)
                left = NUM_BATCHES - step % NUM_BATCHES
                assert (len(again), another.batches_left) == (NUM_BATCHES, left)
                assert [binding.check(*element) for element in again] == expected[step : step + left]
            wrong = [{}, None, {"position": 3}, {"position": "{}"}, {"position": np.zeros(9)}]
            for state in (*wrong, {"position": np.zeros(9, np.uint8)}):
                with pytest.raises(OptionError):
                    again.load_state_dict(state)

    def test_batches_are_copied_to_a_device_ahead(self, binding: Binding, loader: loaderd.Loader):
        before = loader.statistics().batches_delivered
        iterator = iter(binding.batches(loader, ("bits", "id"), device=binding.device, prefetch=2))
        bits, ids = next(iterator)
        assert bits.shape == (BATCH_SIZE, 32) and len(ids) == BATCH_SIZE
        assert loader.statistics().batches_delivered == before + 3 and loader.position.batch == 1
        assert [len(ids) for _, ids in iterator] == [BATCH_SIZE] * 8 + [6] and loader.position.epoch == 1
        before = loader.statistics().batches_delivered
        on_host = next(iter(binding.batches(loader, "id", device=binding.host, prefetch=3)))
        assert binding.lies_in_a_slot(on_host) and loader.statistics().batches_delivered == before + 1
        del bits, ids, iterator

    def test_waits_for_copies_are_counted(self, binding: Binding, loader: loaderd.Loader):
        before_s = loader.statistics().device_wait_s
        for _ in binding.batches(loader, device=binding.host):
            pass
        assert loader.statistics().device_wait_s == before_s, "on the host there are none"
        began_s = time.monotonic()
        for _ in binding.batches(loader, device=binding.device, prefetch=1):
            pass
        waited_s = loader.statistics().device_wait_s - before_s
        now = seen_of_newest()
        assert 0 < waited_s < time.monotonic() - began_s
        assert now.device_wait_s >= waited_s and now.copies_ahead == 1

    def test_batches_outlive_the_loader(self, binding: Binding, loader: loaderd.Loader, shards: list[Path]):
        with loaderd.Loader(shards, loader.schema, batch_size=BATCH_SIZE, workers=1) as another:
            iterator = iter(binding.batches(another, ("bits", "id")))
            element = next(iterator)
        with pytest.raises(ClosedError, match="the loader is closed"):
            next(iterator)
        assert len(binding.check(*element)) == BATCH_SIZE
