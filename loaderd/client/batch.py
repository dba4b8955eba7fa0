"""A batch and the lease on the slot that it lies in.

The arrays of a batch are views of a shared-memory slot. They all hold on to one lease; when the last of them (and of
what was made from them without a copy: slices, tensors) is gone, so is the lease, and its slot goes back to the
daemon. Nobody has to say that a batch is not needed any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.memory.layout import SlotLayout


class Batch(Mapping[str, npt.NDArray[Any]]):
    """The fields of a batch by name, in the schema's order: arrays of shape (records, …).

    The arrays are read-only, and valid as long as anything refers to them.
    """

    __slots__ = ("_fields", "num_records")

    def __init__(self, fields: dict[str, npt.NDArray[Any]], num_records: int) -> None:
        self._fields = fields
        self.num_records = num_records

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in self._fields.items())
        return f"Batch({fields})"


class _Lease:
    """Stands for a slot in the eyes of numpy, which keeps it alive as the base of every view."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: npt.NDArray[np.uint8], address: int, size: int) -> None:
        self._memory = memory  # the mapping must outlive the slot's views
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}


class SlotReader:
    """Makes batches of slots. About 10 µs a batch of three fields."""

    def __init__(self, memory: npt.NDArray[np.uint8], layout: SlotLayout) -> None:
        self._memory = memory
        self._address = memory.__array_interface__["data"][0]
        self._slot_bytes = layout.slot_bytes
        self._fields = [
            (name, offset, spec.record_bytes, spec.dtype, spec.shape)
            for (name, spec), offset in zip(layout.specs.items(), layout.offsets.values(), strict=True)
        ]

    def lend(self, slot: int, num_records: int, release: Callable[[int], None]) -> Batch:
        """The batch in ``slot``, without a copy; ``release(slot)`` is called when nothing refers to it any more."""
        lease = _Lease(self._memory, self._address + slot * self._slot_bytes, self._slot_bytes)
        weakref.finalize(lease, release, slot).atexit = False
        return self._batch(np.asarray(lease), num_records)

    def copy(self, slot: int, num_records: int) -> Batch:
        """A copy of the batch in ``slot``, its fields still at multiples of 64 bytes."""
        start = slot * self._slot_bytes
        room = np.empty(self._slot_bytes + 64, dtype=np.uint8)
        shift = -room.__array_interface__["data"][0] % 64
        copied = room[shift : shift + self._slot_bytes]
        copied[:] = self._memory[start : start + self._slot_bytes]
        copied.flags.writeable = False
        return self._batch(copied, num_records)

    def _batch(self, slot_bytes: npt.NDArray[np.uint8], num_records: int) -> Batch:
        fields = {
            name: slot_bytes[offset : offset + record_bytes * num_records].view(dtype).reshape(num_records, *shape)
            for name, offset, record_bytes, dtype, shape in self._fields
        }
        return Batch(fields, num_records)
