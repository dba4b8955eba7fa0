"""Where things lie in the two shared memories of a stream.

::

    slots     │ slot 0                                  │ slot 1 …
              │ field 0 (batch_size, …) │ field 1 │ …   │          every field at a multiple of 64 bytes
    windows   │ arena 0                                 │ arena 1 …
              │ rows (rows, row_bytes)                  │

A slot holds one batch. An arena holds one window of packed rows, each at the place that the shuffle gives it.

TensorFlow takes over an array without a copy only if it starts at a multiple of 64 bytes. It may then write to this
memory, where it believes that nothing else uses the tensor. That is harmless as long as one consumer has the slot for
itself. Where several consumers read the same slot, every field starts 32 bytes behind a multiple of 64, so that
TensorFlow makes a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.schema import FieldSpec

FIELD_ALIGNMENT_BYTES = 64
Bytes1D = npt.NDArray[np.uint8]


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class SlotLayout(NamedTuple):
    """The fields of one batch in a slot. ``several_readers``: whether more than one consumer reads it."""

    specs: Mapping[str, FieldSpec]
    batch_size: int
    several_readers: bool = False

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the slot's start to each field."""
        found: dict[str, int] = {}
        end = 0
        for name, spec in self.specs.items():
            found[name] = end + self._shift
            end = _align(end + self._shift + spec.record_bytes * self.batch_size, FIELD_ALIGNMENT_BYTES)
        return found

    @property
    def _shift(self) -> int:
        return FIELD_ALIGNMENT_BYTES // 2 if self.several_readers else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: whole pages, so that a reader can have a slot to itself."""
        ends = [start + self.specs[name].record_bytes * self.batch_size for name, start in self.offsets.items()]
        return _align(max([1, *ends]), mmap.PAGESIZE)

    def views(self, memory: Bytes1D, slot: int) -> dict[str, npt.NDArray[Any]]:
        """The fields of ``slot`` as arrays of shape (batch_size, …), without a copy."""
        base = slot * self.slot_bytes
        found = {}
        for name, offset in self.offsets.items():
            spec = self.specs[name]
            start = base + offset
            field = memory[start : start + spec.record_bytes * self.batch_size]
            found[name] = field.view(spec.dtype).reshape(self.batch_size, *spec.shape)
        return found


class WindowLayout(NamedTuple):
    """One window of packed rows in an arena."""

    row_bytes: int
    max_rows: int

    @property
    def arena_bytes(self) -> int:
        """Bytes from one arena to the next."""
        return _align(self.row_bytes * self.max_rows, mmap.PAGESIZE)

    def rows(self, memory: Bytes1D, arena: int) -> npt.NDArray[np.uint8]:
        """uint8, (max_rows, row_bytes): the packed rows, by place."""
        start = arena * self.arena_bytes
        return memory[start : start + self.row_bytes * self.max_rows].reshape(self.max_rows, self.row_bytes)
