"""A loader's batches as PyTorch's tensors.

::

    slot ──► arrays ──► tensors on the host ─┬────────────────────────────────────────────────────► the loop
                                             └──► pinned memory ──a stream of its own──► device ──►

A tensor of ``torch.from_numpy`` holds the array, the array the batch's lease, and what PyTorch makes of a tensor
without a copy (views, ``.numpy()``, what autograd saves) holds the same storage: so the slot comes back with the last
of them. Writing in place changes the reader's own batch alone: a slot is filled anew as a whole.

A GPU copies beside the host's work only from pinned memory, and beside its own work only on another stream. PyTorch
keeps pinned memory from being used anew before the copy out of it is over. The loop's stream waits for the copy, not
the loop; how long, the GPU itself says later, by an event in front of that wait and one behind it. (Tested with
PyTorch's "meta" device; the lines for CUDA were not run yet.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

import loaderd
from loaderd.client.base import BaseLoader
from loaderd.client.copies import CopyWaits
from loaderd.client.elements import Elements, Structure, check_loader, checked_structure
from loaderd.errors import OptionError
from loaderd.options import as_count, require

Tensors = dict[str, torch.Tensor]
_ReadyTensors = Callable[[], Tensors]

# Dtypes of ml_dtypes that PyTorch has, each with the integers that numpy sees in their place.
_BY_BITS = {
    np.dtype(getattr(ml_dtypes, name)): (integers, getattr(torch, name))
    for name, integers in [
        ("bfloat16", np.uint16),
        *((name, np.uint8) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")),
    ]
}


def batches(
    loader: BaseLoader,
    structure: Structure = None,
    *,
    device: str | torch.device | None = None,
    prefetch: int = 2,
) -> Batches:
    """The batches of ``loader`` as tensors.

    Each iteration is one of the loader: a pass in an order of its own. ``loader.position`` stands behind the batch
    that the loop has, ``len()`` is the loader's, and so are errors, closing and the end. ``structure``: nested
    tuples, lists and dicts of field names; None: a dict of all fields. A tensor's shape is (records, …), its dtype
    that of the schema.

    Tensors lie in the loader's shared memory, which is lent as long as any of them, or what was made of it without a
    copy, is alive; who keeps more than ``held_batches`` gets copies. You may write to them. Where several consumers
    read the same memory (``sharing="shared"`` and ``"mirrored"`` of :func:`loaderd.connect`), they are copies.

    ``device``: such as ``"cuda:0"``: batches are copied there, the next ``prefetch`` of them while the loop works on
    this one. They don't count in ``loader.position``, and none is taken ahead of a pass's end, or with
    ``sharing="shared"``. Where they stay on the host (``device`` None or ``"cpu"``), ``prefetch`` is of no effect.

    ``state_dict()`` and ``load_state_dict()`` say and set where the next batch comes from. Raises OptionError for a
    field or a device that does not exist, and for a field that PyTorch has no dtype for.
    """
    check_loader(loader)
    prefetch = as_count(prefetch, "prefetch", "a number of batches, 0 or more", 0)
    found = torch.device("cpu") if device is None else _device_of(device)
    return Batches(loader, checked_structure(structure, loader.schema), found, prefetch)


class Batches(Elements):
    """What :func:`batches` returns."""

    def __init__(
        self,
        loader: BaseLoader,
        structure: Structure,
        device: torch.device,
        prefetch: int,
    ) -> None:
        """``structure`` and ``device`` as they were checked."""
        super().__init__(loader, structure)
        self._device = device
        self._ahead = 0 if device.type == "cpu" else prefetch
        self._readers = {name: _reader_of(name, loader.schema.specs[name].dtype) for name in self._names}

    def __iter__(self) -> Iterator[Any]:
        begin_copy = _copier(self._device, CopyWaits(self.loader, self._ahead))

        def hand_over(batch: loaderd.Batch) -> Callable[[], Any]:
            tensors = {name: read(_own(batch, name)) for name, read in self._readers.items()}
            ready = begin_copy(tensors, batch.num_records)
            return lambda: self._pack(ready())

        return self.loader.iterate(hand_over, self._ahead)


# ------------------------------------------------------------------------------------- one field


def _own(batch: loaderd.Batch, name: str) -> npt.NDArray[Any]:
    """The field's array, which may be written to: tensors may always be."""
    array = batch.writable(name)
    return batch[name].copy() if array is None else array


def _reader_of(name: str, dtype: np.dtype[Any]) -> Callable[[npt.NDArray[Any]], torch.Tensor]:
    """What makes a tensor of an array of this dtype, in the same memory. Raises OptionError where there is none."""
    if dtype in _BY_BITS:
        integers, torch_dtype = _BY_BITS[dtype]
        return lambda array: torch.from_numpy(array.view(integers)).view(torch_dtype)
    alias: Callable[[npt.NDArray[Any]], torch.Tensor] = torch.from_numpy
    try:
        alias(np.empty(0, dtype))
    except TypeError:
        raise OptionError(
            f"fields must be of dtypes that PyTorch has, got field {name!r} of {dtype}",
            hint="Leave it out: give a structure of the other fields; or give it another dtype in the schema.",
        ) from None
    return alias


# ----------------------------------------------------------------------------------- to a device


def _device_of(device: Any) -> torch.device:
    """The device that is meant, with its number. Raises OptionError unless it is here."""
    require(isinstance(device, (str, torch.device)), "device", 'text such as "cuda:0", or a torch.device', device)
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # each kind of device has its own, down to AssertionError
        reason = str(error).splitlines()[0]
        raise OptionError(f"device must be one that PyTorch has here, got {str(device)!r}: {reason}") from None


def _copier(device: torch.device, waits: CopyWaits) -> Callable[[Tensors, int], _ReadyTensors]:
    """Begins to copy tensors of so many records to ``device``; what it returns gives the copies."""
    if device.type == "cpu":
        return lambda tensors, num_records: lambda: tensors
    if device.type == "cuda":
        return _cuda_copier(device, waits)

    def begin(tensors: Tensors, num_records: int) -> _ReadyTensors:
        began_ns = time.perf_counter_ns()
        copies = {name: tensor.to(device) for name, tensor in tensors.items()}
        took_ns = time.perf_counter_ns() - began_ns
        waits.took(took_ns, num_records)
        waits.waited(took_ns, num_records)
        return lambda: copies

    return begin


def _cuda_copier(device: torch.device, waits: CopyWaits) -> Callable[[Tensors, int], _ReadyTensors]:
    stream = torch.cuda.Stream(device)
    waited: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def count() -> None:
        while waited and waited[0][1].query():
            reached, gone_on, num_records = waited.popleft()
            waits.waited(1e6 * reached.elapsed_time(gone_on), num_records)

    def begin(tensors: Tensors, num_records: int) -> _ReadyTensors:
        count()
        began_ns = time.perf_counter_ns()
        with torch.cuda.stream(stream):
            copies = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
            copied = stream.record_event()
        waits.waited(time.perf_counter_ns() - began_ns, num_records)  # to write pinned memory, which is a copy, too

        def ready() -> Tensors:
            loop = torch.cuda.current_stream(device)
            reached = loop.record_event(torch.cuda.Event(enable_timing=True))
            loop.wait_event(copied)
            waited.append((reached, loop.record_event(torch.cuda.Event(enable_timing=True)), num_records))
            for copy in copies.values():
                copy.record_stream(loop)  # or the next copy could get its memory while the loop's work reads it
            return copies

        return ready

    return begin
