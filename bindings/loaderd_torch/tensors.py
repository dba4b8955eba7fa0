"""A loader's batches as PyTorch's tensors.

::

    slot ──► arrays ──► tensors on the host ─┬──────────────────────────────────► the loop
                                             └──a stream of its own──► device ──►

A tensor of ``torch.from_numpy`` keeps the array, which keeps the batch's lease. What PyTorch makes of it without a
copy (views, ``.numpy()``, what autograd saves) keeps the same storage. So the slot comes back when the last of them
is gone. Writing in place changes only the consumer's own batch, because a slot is always filled anew as a whole.

A packed batch (``unpack="device"``) is one tensor of bytes until it is on the device: so there is one copy, and one
event, however many features travel. What is made of it there is in memory of its own.

A GPU can copy while the host works only out of pinned memory, and while it computes only on another stream. So the
slots themselves are pinned. (``pin_memory()`` is a copy, on all cores: 19 ms of CPU time for a batch of 6 MB on a
machine of 16 cores, and slower than a plain ``.to(device)``.) PyTorch does not know that the memory is pinned, and
does not keep it until the copy is over: this module does. The loop's stream waits for the copy, not the loop. Two
events, in front of that wait and behind it, tell later how long it took.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.utils._pytree as pytree
from torch.utils.data import IterableDataset

import loaderd
from loaderd.client.elements import DeviceCopyTimer, Elements, Structure, checked_prefetch
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import require, suggests_options
from loaderd_torch.callers import HOW_TO_SKIP, check_callers, worker_error
from loaderd_torch.dtypes import tensor_of
from loaderd_torch.unpack import BlockReader, Unpacker

Tensors = dict[str, torch.Tensor]
_ReadyTensors = Callable[[], Tensors]
_Fields = Callable[[Tensors], Tensors]


@suggests_options
def batches(
    loader: Loader,
    structure: Structure = None,
    *,
    device: str | torch.device | None = None,
    prefetch: int | None = None,
) -> Batches:
    """The batches of ``loader`` as tensors.

    Each iteration is a pass of the loader, in another order, with the loader's length and errors. ``loader.position``
    counts the batch that the loop has. ``structure``: nested tuples, lists and dicts of field names; None: a dict of
    all fields. A tensor's shape is (records, …), its dtype that of the schema.

    Tensors lie in the loader's shared memory, which is lent as long as any of them, or anything made from one without
    a copy, is alive; if you keep more than ``held_batches`` batches, you get copies. You may write to the tensors. A
    fork needs copies of those that it inherits: it does not keep them from being used for later batches. If several
    consumers read the same memory (``sharing="mirrored"`` of :func:`loaderd.connect`), all tensors are copies.

    ``device``: such as ``"cuda:0"``: batches are copied there, the next ``prefetch`` (2) of them while the loop
    works on this one. Those don't count in ``loader.position``. None is copied ahead across the end of a pass. On the
    host, the workers are ahead by themselves: ``prefetch`` without a ``device`` is an OptionError.

    For a GPU, the loader's memory is pinned. From then on, its tensors on the host are copies, because a
    ``.to("cuda", non_blocking=True)`` of one would still be under way when its slot is filled again. Arrays that you
    take of the loader itself are no copies: keep them until such a copy is over.

    The result is also an ``IterableDataset``, for ``DataLoader(batches, batch_size=None)``, and has what training
    frameworks look for. ``state_dict()`` returns where the loop stands; after ``load_state_dict()``, the next
    iteration begins there. After ``set_epoch(n)``, it is iteration n. ``batch_size`` is the loader's.

    Raises OptionError for a field or a device that does not exist, and for a dtype that PyTorch does not have; also
    with an iteration's first batch, if a DataLoader would batch again, or a framework lose or repeat records.
    """
    return Batches(loader, structure, device, prefetch)


class Batches(Elements, IterableDataset[Any]):  # type: ignore[misc]  # torch is not there for mypy
    """What :func:`batches` returns."""

    batch_sampler = None

    def __init__(
        self,
        loader: Loader,
        structure: Structure,
        device: str | torch.device | None,
        prefetch: int | None,
    ) -> None:
        super().__init__(loader, structure, checked_prefetch(prefetch, device))
        self._device = torch.device("cpu") if device is None else _device_of(device)
        self._ahead = 0 if self._device.type == "cpu" else self._prefetch
        for name in self._names:
            _check_dtype(name, loader._unpacked_schema.specs[name].dtype)
        self._take = self._take_fields
        if loader._options.unpack == "device":
            self._unpacker = Unpacker(loader._unpacked_schema.device_program(), self._names, self._device)
            self._read = BlockReader({name: loader.schema.specs[name] for name in self._unpacker.inputs})
            self._take = self._take_blocks
        self._epoch_is_set = False  # since the last iteration

    # ------------------------------------------------------------------- what training frameworks look for

    @property
    def batch_size(self) -> int:
        """Records of a batch that is not an epoch's last."""
        return self.loader.batch_size

    @property
    def sampler(self) -> Batches:
        """The object whose ``set_epoch`` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be number ``epoch`` (from 0), as in a program that began at the beginning.

        If ``load_state_dict()`` has put the loop into the middle of that one, it stays there; if into another one,
        raises OptionError.
        """
        check_callers(self.loader, True)
        self.loader._seek_iteration(epoch)
        self._epoch_is_set = True

    def state_dict(self, *_: object) -> dict[str, Any]:
        """Where the loop stands. (Composer gives the number of samples, which is not needed.)"""
        return super().state_dict()

    @property
    def dataset(self) -> NoReturn:
        """Absent: transformers and accelerate would put this into a DataLoader that is not told the epoch."""
        raise AttributeError(f"loaderd_torch.batches has no attribute 'dataset': {HOW_TO_SKIP}")

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises TypeError: ``Subset`` and ``random_split`` ask for records by number."""
        raise TypeError(
            f"loaderd_torch.batches gives batches in their order, and none by its number, got [{index!r:.80}]\n"
            "Iterate over it. To split data, loaderd.Dataset(shards, schema).split(0.9, 0.1), and a loader of each."
        )

    def __reduce__(self) -> Any:
        """Raises OptionError: a DataLoader whose workers are not forks pickles its data set for them."""
        raise worker_error(
            "loaderd_torch.batches cannot be pickled, nor copied; num_workers of the DataLoader must be 0"
        )

    # ---------------------------------------------------------------------------------------- iterating

    def __iter__(self) -> Iterator[Any]:
        try:
            check_callers(self.loader, self._epoch_is_set)
        except OptionError as error:
            return _raising(error)  # with the first batch: what Lightning does behind an error of iter() hides it
        self._epoch_is_set = False
        begin_copy = _copier(self._device, DeviceCopyTimer(self.loader, self._ahead))

        def hand_over(batch: loaderd.Batch) -> Callable[[], Any]:
            if self._device.type == "cuda":
                batch._pin()
            elif batch._is_pinned:
                batch = batch.copy()
            tensors, fields_of = self._take(batch)
            ready = begin_copy(tensors, batch.num_records)
            return lambda: self._pack(fields_of(ready()))

        return self.loader._iterate(hand_over, self._ahead)

    def _take_fields(self, batch: loaderd.Batch) -> tuple[Tensors, _Fields]:
        """What is copied of a batch, and what makes the element's fields of the copy."""
        return {name: tensor_of(_own(batch, name)) for name in self._names}, lambda tensors: tensors

    def _take_blocks(self, batch: loaderd.Batch) -> tuple[Tensors, _Fields]:
        """The same of a packed batch: few blocks, so that there are few copies."""
        blocks, num_records = batch._blocks(self._unpacker.inputs), batch.num_records
        offsets = {str(number): block.offsets for number, block in enumerate(blocks)}

        def fields_of(copies: Tensors) -> Tensors:
            packed: Tensors = {}
            for number, copy in copies.items():
                packed |= self._read(copy, offsets[number], num_records)
            return self._unpacker(packed)

        return {str(number): torch.from_numpy(block.bytes) for number, block in enumerate(blocks)}, fields_of


def _raising(error: OptionError) -> Iterator[Any]:
    raise error
    yield


# ---------------------------------------------------------------------------------- loaderd's own batches

pytree.register_pytree_node(
    loaderd.Batch,
    lambda batch: (list(batch.values()), tuple(batch)),
    lambda values, names: loaderd.Batch(zip(names, values, strict=True)),
    serialized_type_name="loaderd.Batch",
    flatten_with_keys_fn=lambda batch: ([(pytree.MappingKey(name), batch[name]) for name in batch], tuple(batch)),
)


# ------------------------------------------------------------------------------------- one field


def _own(batch: loaderd.Batch, name: str) -> npt.NDArray[Any]:
    """The field's array, or a copy of it, that may be written to: PyTorch has no read-only tensors."""
    array = batch.writable(name)
    return batch[name].copy() if array is None else array


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise OptionError unless PyTorch has this dtype."""
    try:
        tensor_of(np.empty(0, dtype))
    except TypeError:
        raise OptionError(
            f"fields must be of dtypes that PyTorch has, got field {name!r} of {dtype}",
            hint="Leave it out: give a structure of the other fields; or give it another dtype in the schema.",
        ) from None


# ----------------------------------------------------------------------------------- to a device


def _device_of(device: Any) -> torch.device:
    """``device`` with its number. Raises OptionError unless PyTorch has it here."""
    require(isinstance(device, (str, torch.device)), "device", 'text such as "cuda:0", or a torch.device', device)
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # each kind of device raises another one, such as AssertionError
        reason = str(error).splitlines()[0][:200]
        raise OptionError(f"device must be one that PyTorch has here, got {str(device)!r}: {reason}") from None


def _copier(device: torch.device, waits: DeviceCopyTimer) -> Callable[[Tensors, int], _ReadyTensors]:
    """A function that begins to copy tensors of so many records to ``device``, and returns what gives the copies."""
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


def _cuda_copier(device: torch.device, waits: DeviceCopyTimer) -> Callable[[Tensors, int], _ReadyTensors]:
    stream = torch.cuda.Stream(device)
    under_way = _PendingCopies()
    waited: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def count() -> None:
        while waited and waited[0][1].query():
            reached, gone_on, num_records = waited.popleft()
            waits.waited(1e6 * reached.elapsed_time(gone_on), num_records)

    def begin(tensors: Tensors, num_records: int) -> _ReadyTensors:
        count()
        under_way.let_go()
        began_ns = time.perf_counter_ns()
        with torch.cuda.stream(stream):
            copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
            copied = stream.record_event()
        under_way.keep(copied, tensors)
        waits.waited(time.perf_counter_ns() - began_ns, num_records)  # where the memory is not pinned, it copies here

        def ready() -> Tensors:
            loop = torch.cuda.current_stream(device)
            reached = loop.record_event(torch.cuda.Event(enable_timing=True))
            loop.wait_event(copied)
            waited.append((reached, loop.record_event(torch.cuda.Event(enable_timing=True)), num_records))
            for copy in copies.values():
                copy.record_stream(loop)  # or a later copy could get its memory while the loop's stream reads it
            return copies

        return ready

    return begin


class _PendingCopies:
    """Keeps what is being copied until it is: the slots must not be filled again before. Its end waits for that."""

    def __init__(self) -> None:
        self._copies: deque[tuple[torch.cuda.Event, Tensors]] = deque()
        weakref.finalize(self, _wait_for, self._copies).atexit = False

    def keep(self, copied: torch.cuda.Event, tensors: Tensors) -> None:
        """Keep ``tensors`` until the event ``copied``."""
        self._copies.append((copied, tensors))

    def let_go(self) -> None:
        """Let go of what is copied. Does not wait."""
        while self._copies and self._copies[0][0].query():
            self._copies.popleft()


def _wait_for(copies: deque[tuple[torch.cuda.Event, Tensors]]) -> None:
    while copies:
        copies[0][0].synchronize()
        copies.popleft()
