"""A batch and the lease on the slot that it lies in.

The arrays of a batch are views of a shared-memory slot, and all of them hold on to one lease. When the last of them
is gone, and the last slice or tensor that was made of them without a copy, the lease ends, and a worker can fill the
slot again. Nobody has to say that a batch is not needed any more.

When the last reference goes, in whatever thread, only ``deque.append`` runs, and no Python code. So Ctrl-C cannot
come in between, and lose a slot.

The slots of a group have several readers. When a reader's connection has ended, its slots are filled again as soon as
the daemon knows. So before it ends, the reader makes the slots whose batches are still held its own
(:meth:`SlotReader.make_private`): copies take the place of their memory pages, and every array stays where it is.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.shm.anonymous import SharedMemory, make_private
from loaderd.shm.layout import FIELD_ALIGNMENT_BYTES, Bytes1D, SlotLayout

_MOST_BETWEEN_BYTES = 1 << 16  # of fields that nobody wants: fewer are copied in less time than a call takes


class Block(NamedTuple):
    """Memory in which fields lie one behind the other.

    ``bytes``: uint8, (bytes,). ``offsets``: where each field begins, each as many bytes behind a multiple of 64.
    """

    bytes: Bytes1D
    offsets: Mapping[str, int]


class Batch(Mapping[str, npt.NDArray[Any]]):
    """The fields of a batch by name, in the schema's order: arrays of shape (records, …).

    The arrays are read-only, and valid as long as anything refers to them.

    Code that rebuilds mappings, as Lightning and JAX do to change the values of one, makes a ``Batch`` of what it has
    made of the arrays: ``Batch({name: value, …})``.
    """

    __slots__ = ("_block", "_fields", "_memory")

    def __init__(
        self,
        fields: Mapping[str, npt.NDArray[Any]] | Iterable[tuple[str, npt.NDArray[Any]]],
        memory: SharedMemory | None = None,
        block: Block | None = None,
    ) -> None:
        self._fields: dict[str, npt.NDArray[Any]] = fields if type(fields) is dict else dict(fields)
        self._memory = memory  # of all slots, in one of which the arrays lie; None: they have memory of their own
        self._block = block  # in which the arrays lie; None: nobody knows that of them

    @property
    def num_records(self) -> int:
        """The number of records, which is the length of each field."""
        for array in self._fields.values():
            return len(array)
        return 0

    def writable(self, name: str) -> npt.NDArray[Any] | None:
        """The same memory as ``self[name]``, as an array that may be written to, or None if others read it too.

        It starts at a multiple of 64 bytes. DLPack, and libraries that take memory over by it, ask for such an array.
        """
        array: npt.NDArray[Any] = self._fields[name].view()
        try:
            array.setflags(write=True)
        except ValueError:  # the mapping itself is read-only
            return None
        return array

    def _blocks(self, names: Collection[str]) -> list[Block]:
        """The fields ``names`` as few blocks, for a copy of each to a device: neighbours are in one.

        A block may be written to, and begins with a field. It is the memory of the batch itself where that is the
        consumer's alone, else a copy.
        """
        if self._block is None:
            return Batch({name: self._fields[name] for name in names}).copy()._blocks(names)
        whole, places = self._block
        runs: list[list[str]] = []
        end = 0
        for name in sorted(names, key=places.__getitem__):
            if not runs or places[name] - end > _MOST_BETWEEN_BYTES:
                runs.append([])
            runs[-1].append(name)
            end = max(end, places[name] + self._fields[name].nbytes)
        blocks = []
        for run in runs:
            first = places[run[0]]
            part = whole[first : max(places[name] + self._fields[name].nbytes for name in run)]
            offsets = {name: places[name] - first for name in run}
            blocks.append(Block(part if part.flags.writeable else part.copy(), offsets))
        return blocks

    def _pin(self) -> None:
        """Have GPUs copy out of the slots by themselves, from now on: see ``shm.pinned``.

        A copy then goes on after the call that began it: the arrays must be kept until it is over.
        """
        if self._memory is not None:
            from loaderd.shm.pinned import pin  # for GPUs only

            pin(self._memory)

    @property
    def _is_pinned(self) -> bool:
        """Whether GPUs copy the arrays by themselves."""
        return self._memory is not None and bool(self._memory.is_pinned)

    def copy(self) -> Batch:
        """The same values in memory of its own, each field at a multiple of 64 bytes."""
        offsets, end = {}, 0
        for name, array in self._fields.items():
            offsets[name] = end
            end += -(-array.nbytes // FIELD_ALIGNMENT_BYTES) * FIELD_ALIGNMENT_BYTES
        room = np.empty(end + FIELD_ALIGNMENT_BYTES, np.uint8)
        shift = -room.__array_interface__["data"][0] % FIELD_ALIGNMENT_BYTES
        block = Block(room[shift : shift + end], offsets)
        fields = {}
        for name, array in self._fields.items():
            copied = np.ndarray(array.shape, array.dtype, block.bytes, offsets[name])
            copied[...] = array
            copied.flags.writeable = False
            fields[name] = copied
        return Batch(fields, block=block)

    def __reduce__(self) -> Any:
        """The arrays alone, of the memory of all slots."""
        return Batch, (self._fields,)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; there are {', '.join(self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}: {value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else f"{name}: {value!r:.80}"
            for name, value in self._fields.items()
        )
        return f"Batch({fields})"


HandOver = Callable[[Batch], Callable[[], Any]]
"""Begins to turn a batch into what the consumer gets; the function that it returns gives that, or waits for it."""


def identity(batch: Batch) -> Callable[[], Batch]:
    """The HandOver of a consumer who gets the batches themselves."""
    return lambda: batch


class _Lease:
    """What numpy takes for a slot's memory, and keeps alive as the base of every view."""

    __slots__ = ("__array_interface__", "__weakref__", "_is_private", "_memory", "_place")

    def __init__(self, memory: SharedMemory, address: int, size: int) -> None:
        self._memory = memory  # the mapping must outlive the slot's views
        read_only = not memory.writable
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, read_only)}
        self._place = address, size
        self._is_private = False

    def make_private(self) -> None:
        """See :meth:`SlotReader.make_private`."""
        if not self._is_private:
            make_private(*self._place)
            self._is_private = True  # last: another thread that reads it may end the connection


class SlotReader:
    """Makes batches of slots. A batch that outlives the reader keeps only the memory alive.

    About 8 µs a batch of three fields.
    """

    def __init__(self, memory: SharedMemory, layout: SlotLayout) -> None:
        self._memory = memory
        self._lent: dict[weakref.ref[_Lease], int] = {}
        """The slots whose lease has not ended, or has ended and was not taken back."""
        self.ended: deque[weakref.ref[_Lease]] = deque()
        """The leases whose slots :meth:`take_back` will return."""
        self._address = memory.bytes.__array_interface__["data"][0]
        self._slot_bytes = layout.slot_bytes
        self._offsets = layout.offsets
        self._fields = [(name, self._offsets[name], spec.dtype, spec.shape) for name, spec in layout.specs.items()]

    @property
    def num_lent(self) -> int:
        """Slots that something refers to."""
        return len(self._lent) - len(self.ended)

    def make_private(self) -> None:
        """Keep the batches that are held as they are, whoever writes to their slots. From any thread, more than once.

        Batches that are lent later are not protected. Raises DaemonError where there is not enough memory.
        """
        for ref in list(self._lent):
            if (lease := ref()) is not None:
                lease.make_private()

    def take_back(self) -> list[int]:
        """The slots that nothing refers to any more, each of them once."""
        slots = []
        while self.ended:
            slots.append(self._lent.pop(self.ended.popleft()))
        return slots

    def lend(self, slot: int, num_records: int) -> Batch:
        """The batch in ``slot``, without a copy."""
        lease = _Lease(self._memory, self._address + slot * self._slot_bytes, self._slot_bytes)
        self._lent[weakref.ref(lease, self.ended.append)] = slot
        return self._batch(np.asarray(lease), num_records, self._memory)

    def copy(self, slot: int, num_records: int) -> Batch:
        """A copy of the batch in ``slot``, its fields at multiples of 64 bytes."""
        return self._batch(self._memory.bytes[slot * self._slot_bytes :][: self._slot_bytes], num_records).copy()

    def _batch(
        self, slot_bytes: npt.NDArray[np.uint8], num_records: int, memory: SharedMemory | None = None
    ) -> Batch:
        read_only = slot_bytes[:]
        read_only.flags.writeable = False
        # One call for each array, where a slice, a view and a reshape would be three.
        fields: dict[str, npt.NDArray[Any]] = {
            name: np.ndarray((num_records, *shape), dtype, read_only, offset)
            for name, offset, dtype, shape in self._fields
        }
        return Batch(fields, memory, Block(slot_bytes, self._offsets))
