"""A loader's batches as JAX arrays.

::

    slot ──► arrays ──device_put──┬──► JAX arrays on the host, in the slot's memory ──► the loop
                                  └──► a copy on other devices, begun ahead ──────────►

``device_put(…, may_alias=True)`` uses the memory of a numpy array without a copy where that starts at a multiple of
64 bytes, as all fields do. The JAX array, and any computation that still runs on it, keeps the numpy array, which
keeps the batch's lease. So no slot is filled again while JAX reads it. Nothing else writes there either: JAX's arrays
cannot be written to, and JAX never uses memory that is not its own for an output, even where the argument is donated.
(DLPack does the same, but numpy cannot hand over bfloat16 by it.)

JAX gives back what it no longer needs when it is called next; the iterator calls it for each batch. A copy to an
accelerator goes on while Python does other things, and holds the batch until it is over. The loop gets a batch when
it is on the device, so that the length of the wait is known; a computation could not begin earlier in any case.
JAX copies to a GPU through pinned memory of its own, with threads of its own.

A packed batch (``unpack="device"``) is one array of bytes until it is on the device: to put an array there takes
30 µs, however small it is. Where a sharding divides the records, each packed field is an array of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

import loaderd
from loaderd.client.elements import DeviceCopyTimer, Elements, Structure, checked_prefetch
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import require, suggests_options
from loaderd_jax.unpack import Unpacker, can_be_in_block

_Fields = Callable[[Any], Mapping[str, jax.Array]]
_STATE_BYTES = 1024
_TIMED_COPIES = 3  # with prefetch=2, so many begin before the model has anything to do


@suggests_options
def batches(
    loader: Loader,
    structure: Structure = None,
    *,
    device: jax.Device | jax.sharding.Sharding | None = None,
    prefetch: int | None = None,
) -> Batches:
    """The batches of ``loader`` as JAX arrays.

    Each iteration is a pass of the loader, in another order, with the loader's length and errors. ``loader.position``
    counts the batch that the loop has. ``structure``: nested tuples, lists and dicts of field names; None: a dict of
    all fields. An array's shape is (records, …), its dtype that of the schema.

    ``device``: a device or a sharding; None: JAX's default device. On the first CPU, arrays lie in the loader's
    shared memory, which is lent as long as any of them is alive; if you keep more than ``held_batches`` batches, you
    get copies. To any other device batches are copied, the next ``prefetch`` (2) of them while the loop works
    on this one. Those don't count in ``loader.position``. None is copied ahead across the end of a pass. With a
    sharding over several processes, an array is made of the batches of all of them; each process gives its own part.
    A sharding that divides the records needs batches that it can divide: with ``remainder="drop"`` and
    ``on_corrupt="raise"``, a loader has no short one. ``prefetch`` without a ``device`` is an OptionError.

    ``state_dict()`` returns where the loop stands, in an array; after ``load_state_dict()``, the next iteration
    begins there.

    Raises OptionError for a field that does not exist, for a sharding that does not divide the batches (with the
    first one that it does not divide), and for a dtype that JAX does not have. Without ``jax_enable_x64``, JAX has no
    dtypes of 64 bits.
    """
    return Batches(loader, structure, device, prefetch)


class Batches(Elements):
    """What :func:`batches` returns."""

    def __init__(
        self,
        loader: Loader,
        structure: Structure,
        device: jax.Device | jax.sharding.Sharding | None,
        prefetch: int | None,
    ) -> None:
        super().__init__(loader, structure, checked_prefetch(prefetch, device))
        is_place = device is None or isinstance(device, (jax.Device, jax.sharding.Sharding))
        require(is_place, "device", "a jax.Device, a jax.sharding.Sharding or None", device)
        specs = loader._unpacked_schema.specs
        for name in self._names:
            _check_dtype(name, specs[name].dtype)
        self._device = device
        self._put = _putter(device)
        self._inputs = self._names
        """The fields of the loader's batches that are put on the device."""
        self._take = self._take_fields
        if loader._options.unpack == "device":
            self._unpacker = Unpacker(loader._unpacked_schema.device_program(), self._names)
            self._inputs = self._unpacker.inputs
            dtypes = {name: loader.schema.specs[name].dtype for name in self._inputs}
            for name, dtype in dtypes.items():
                _check_dtype(name, dtype)
            is_divided = isinstance(device, jax.sharding.Sharding) and len(device.device_set) > 1
            in_blocks = not is_divided and all(map(can_be_in_block, dtypes.values()))
            self._take = self._take_blocks if in_blocks else self._take_packed_fields
        self._check_division(loader.batch_size)
        self._copies = not _is_host(device)
        self._ahead = self._prefetch if self._copies else 0
        self._waits = DeviceCopyTimer(loader, self._ahead)

    def __iter__(self) -> Iterator[Any]:
        return self.loader._iterate(self._begin_copy if self._copies else self._hand_over, self._ahead)

    def _check_division(self, num_records: int) -> None:
        """Raise OptionError where a sharding cannot divide a batch of so many records."""
        sharding = self._device
        if not isinstance(sharding, jax.sharding.Sharding) or not sharding.is_fully_addressable:
            return  # no process knows the batches of the others
        for name in self._inputs:
            shape = num_records, *self.loader.schema.specs[name].shape
            try:
                sharding.shard_shape(shape)
            except ValueError as error:
                raise OptionError(
                    f"device must be a sharding that divides field {name!r} of shape {shape}, got {sharding}: "
                    f"{str(error).splitlines()[0]:.200}",
                    hint="Choose another batch_size or PartitionSpec."
                    if num_records == self.loader.batch_size
                    else 'It is a short batch: give the loader remainder="drop".',
                ) from None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: ``loader.position`` as text, as an array of its characters: uint8, (k · 1024,).

        Checkpoints of JAX's, such as orbax's ``StandardSave``, hold arrays, and no text. Spaces fill the array, so
        that a later state has the same shape.
        """
        text = super().state_dict()["position"].encode()
        return {"position": np.frombuffer(text.ljust(-(-len(text) // _STATE_BYTES) * _STATE_BYTES), np.uint8)}

    def _take_fields(self, batch: loaderd.Batch) -> tuple[Any, _Fields]:
        """What is put on the device of a batch, and what makes the element's fields of that."""
        return {name: self._put(batch[name]) for name in self._inputs}, lambda arrays: arrays

    def _take_packed_fields(self, batch: loaderd.Batch) -> tuple[Any, _Fields]:
        return {name: self._put(batch[name]) for name in self._inputs}, self._unpacker

    def _take_blocks(self, batch: loaderd.Batch) -> tuple[Any, _Fields]:
        """The same of a packed batch: few blocks, so that there are few copies."""
        blocks = batch._blocks(self._inputs)
        fields = tuple(
            (name, number, (offset, batch[name].dtype, batch[name].shape))
            for number, block in enumerate(blocks)
            for name, offset in block.offsets.items()
        )
        return [self._put(block.bytes) for block in blocks], lambda copies: self._unpacker.of_blocks(copies, fields)

    def _hand_over(self, batch: loaderd.Batch) -> Callable[[], Any]:
        arrays, fields_of = self._take(batch)
        return lambda: self._pack(fields_of(arrays))

    def _begin_copy(self, batch: loaderd.Batch) -> Callable[[], Any]:
        num_records, began_ns = batch.num_records, time.perf_counter_ns()
        if num_records != self.loader.batch_size:
            self._check_division(num_records)
        arrays, fields_of = self._take(batch)
        if self._waits.copies_timed < _TIMED_COPIES:
            jax.block_until_ready(arrays)
            self._waits.took(time.perf_counter_ns() - began_ns, num_records)
        return lambda: self._pack(fields_of(self._waits.wait(num_records, lambda: jax.block_until_ready(arrays))))


def _named(batch: loaderd.Batch) -> Any:
    return [(jax.tree_util.DictKey(name), batch[name]) for name in batch], tuple(batch)


jax.tree_util.register_pytree_with_keys(
    loaderd.Batch,
    _named,
    lambda names, values: loaderd.Batch(zip(names, values, strict=True)),
    lambda batch: (tuple(batch.values()), tuple(batch)),
)


def _putter(device: jax.Device | jax.sharding.Sharding | None) -> Callable[[Any], jax.Array]:
    """The function that makes a JAX array of a batch's array."""
    if isinstance(device, jax.sharding.Sharding) and not device.is_fully_addressable:
        return lambda array: jax.make_array_from_process_local_data(device, array)
    return lambda array: jax.device_put(array, device, may_alias=True)


def _is_host(device: jax.Device | jax.sharding.Sharding | None) -> bool:
    """Whether arrays stay where they are: on the first CPU device."""
    if isinstance(device, jax.sharding.Sharding):
        devices = device.device_set
    else:
        devices = jax.device_put(np.zeros(0, np.uint8), device).devices()
    (first, *others) = devices
    return not others and first.platform == "cpu" and first == jax.local_devices(backend="cpu")[0]


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise OptionError unless JAX has this dtype."""
    hint = "Leave it out: give a structure of the other fields; or give it another dtype in the schema."
    try:
        jax_dtype = jax.device_put(np.zeros(0, dtype)).dtype
    except TypeError:
        raise OptionError(
            f"fields must be of dtypes that JAX has, got field {name!r} of {dtype}", hint=hint
        ) from None
    if jax_dtype != dtype:
        raise OptionError(
            f"field {name!r} is {dtype}, and JAX would make {jax_dtype} of it, silently, "
            "even of values that do not fit",
            hint=f"In the schema, say dtype={jax_dtype.name!r}; or jax.config.update('jax_enable_x64', True).",
        )
