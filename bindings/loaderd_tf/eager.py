"""A loader's batches as eager tensors, without tf.data: for training loops of one's own.

::

    slot ──► arrays ──DLPack──► tensors on the host ─┬──────────────────────────────────────────► the loop
                                                     └──► a thread that copies to a device ──►

DLPack hands memory over without a copy. Its capsule keeps the array, which keeps the batch's lease, and TensorFlow
keeps the capsule until the last tensor that looks there is gone. So the slot comes back then, and not before.
TensorFlow does not write there in place, as it may into arrays of a ``tf.numpy_function``, because memory that came
by DLPack is not its own.

A copy to a GPU waits for all that the GPU was given before, and the thread that asks for it waits, too. So a separate
thread asks for copies, and measures how long each took. The slots are pinned for it, and TensorFlow keeps a tensor
until its copy is over.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

import loaderd
from loaderd.client.elements import DeviceCopyTimer, Elements, Structure, check_loader
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import suggests_options
from loaderd_tf.graphs import unconverted
from loaderd_tf.structure import check_element, has_gpu, is_host
from loaderd_tf.unpack import Unpacker

_from_dlpack = tf.experimental.dlpack.from_dlpack


@unconverted
@suggests_options
def batches(
    loader: Loader,
    structure: Structure = None,
    *,
    device: str | None = None,
    prefetch: int | None = None,
) -> Batches:
    """The batches of ``loader`` as eager tensors, for a training loop of one's own; without what tf.data costs.

    Each iteration is a pass of the loader, in another order, with the loader's length and errors. ``loader.position``
    counts the batch that the loop has. ``structure`` is that of :func:`from_loader`. A tensor's shape is (records,
    …), its dtype that of the schema.

    Tensors lie in the loader's shared memory, which is lent as long as any of them, or anything made from one without
    a copy, is alive; if you keep more than ``held_batches`` batches, you get copies. TensorFlow copies text, and
    numbers of less than 16 bits that numpy does not have (float8, int4). It copies everything where several consumers
    read the same memory (``sharing="mirrored"`` of :func:`loaderd.connect`).

    ``device``: such as ``"/GPU:0"``: batches are copied there, the next ``prefetch`` (2) of them while the loop
    works on this one. Those don't count in ``loader.position``. None is copied ahead across the end of a pass. On the
    host, the workers are ahead by themselves: ``prefetch`` without a ``device`` is an OptionError.

    This is no ``tf.data.Dataset``: for ``model.fit``, or to iterate in a ``tf.function``, use :func:`from_loader`.
    Raises OptionError for a field or a device that does not exist, and in a ``tf.function`` that is being traced.
    """
    check_loader(loader)
    structure, ahead = check_element(structure, prefetch, device, loader._unpacked_schema)
    return Batches(loader, structure, None if device is None or is_host(device) else device, ahead)


class Batches(Elements):
    """What :func:`batches` returns."""

    def __init__(self, loader: Loader, structure: Structure, device: str | None, prefetch: int) -> None:
        """``structure``: checked; ``device``: None is the host."""
        super().__init__(loader, structure, prefetch)
        self._device = device
        self._waits = DeviceCopyTimer(loader, prefetch)
        self._pins = False
        self._unpack: Callable[[_Tensors], _Tensors] | None = None
        inputs = {name: loader._unpacked_schema.specs[name] for name in self._names}
        if loader._options.unpack == "device":
            unpacker = Unpacker(loader._unpacked_schema, self._names)
            inputs = unpacker.inputs
            self._unpack = unpacker.compiled()
        self._fields = {name: _reader_of(spec.dtype) for name, spec in inputs.items()}

    @unconverted
    def __iter__(self) -> Iterator[Any]:
        _check_eager()
        self._pins = has_gpu()
        if self._device is None:
            return self.loader._iterate(lambda batch: lambda: self._element(self._tensors(batch)))
        return self.loader._iterate(partial(self._begin_copy, _Copier(self._device)), self._prefetch)

    def _begin_copy(self, copier: _Copier, batch: loaderd.Batch) -> Callable[[], Any]:
        wait, num_records = copier.begin(self._tensors(batch)), batch.num_records
        return lambda: self._element(self._copied(wait, num_records))

    def _copied(self, wait: Callable[[], tuple[_Tensors, int]], num_records: int) -> _Tensors:
        began_ns = time.perf_counter_ns()
        tensors, took_ns = wait()
        self._waits.took(took_ns, num_records)
        self._waits.waited(time.perf_counter_ns() - began_ns, num_records)
        return tensors

    def _element(self, tensors: _Tensors) -> Any:
        if self._unpack is not None:
            with tf.device(self._device or "/CPU:0"):
                tensors = self._unpack(tensors)
        return self._pack(tensors)

    def _tensors(self, batch: loaderd.Batch) -> _Tensors:
        _check_eager()
        if self._pins:
            batch._pin()
        return {name: read(batch, name) for name, read in self._fields.items()}


def _check_eager() -> None:
    """Raise OptionError in a function that is being traced: a batch would become a constant of its graph."""
    if not tf.executing_eagerly():
        raise OptionError(
            "loaderd_tf.batches are eager tensors, and this is a tf.function that is being traced",
            hint="Iterate outside, and give it the tensors; or iterate over a data set: "
            "loaderd_tf.make_dataset, loaderd_tf.from_loader.",
        )


# ------------------------------------------------------------------------------------- one field


def _reader_of(dtype: np.dtype[Any]) -> Callable[[loaderd.Batch, str], tf.Tensor]:
    """The function that makes a tensor of a batch's field."""
    if dtype.kind in "biufc" and dtype.type.__module__ == "numpy":
        return _alias
    return _alias_bits if dtype == ml_dtypes.bfloat16 else _copy


def _alias(batch: loaderd.Batch, name: str) -> tf.Tensor:
    array = batch.writable(name)
    return _copy(batch, name) if array is None else _from_dlpack(array.__dlpack__())


def _alias_bits(batch: loaderd.Batch, name: str) -> tf.Tensor:
    """For bfloat16, which DLPack has, but which numpy cannot hand over by it."""
    array = batch.writable(name)
    if array is None:
        return _copy(batch, name)
    return tf.bitcast(_from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)


def _copy(batch: loaderd.Batch, name: str) -> tf.Tensor:
    return tf.constant(batch[name])


# ----------------------------------------------------------------------------------- to a device


_Tensors = dict[str, tf.Tensor]  # by field
_Result = tuple[_Tensors, int | Exception]
"""Tensors on the device, and how many ns it took to copy them; or what was to be copied, and why it was not."""
_Jobs = SimpleQueue[tuple[_Tensors, "Future[_Result]"] | None]


class _Copier:
    """A thread that copies tensors to a device, in order. It ends with this object, or with the program."""

    def __init__(self, device: str) -> None:
        self._jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_copy_all, args=(self._jobs, device), name="loaderd-copy", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def begin(self, tensors: _Tensors) -> Callable[[], tuple[_Tensors, int]]:
        """Begin to copy ``tensors``, which are kept only until they are copied.

        The function that this returns waits for the copies. It raises the error of a copy that failed; the next call
        of it then begins the copy anew.
        """
        pending = self._submit(tensors)
        failed: _Tensors | None = None
        del tensors

        def wait() -> tuple[_Tensors, int]:
            nonlocal pending, failed
            if failed is not None:
                # Nothing is called between the two assignments, so Ctrl-C cannot come between them.
                pending, failed = self._submit(failed), None
            copied, took_ns = pending.result()
            if isinstance(took_ns, Exception):
                failed = copied
                try:
                    raise took_ns
                finally:
                    del copied, took_ns  # or whoever keeps the error would keep the tensors
            return copied, took_ns

        return wait

    def _submit(self, tensors: _Tensors) -> Future[_Result]:
        result: Future[_Result] = Future()
        self._jobs.put((tensors, result))
        return result


def _copy_all(jobs: _Jobs, device: str) -> None:
    while (job := jobs.get()) is not None:
        tensors, result = job
        try:
            began_ns = time.perf_counter_ns()
            with tf.device(device):
                copied = {name: tf.identity(tensor) for name, tensor in tensors.items()}
            result.set_result((copied, time.perf_counter_ns() - began_ns))
            del copied
        except Exception as error:  # such as that the device has no memory left: raised where the loop waits
            result.set_result((tensors, error))
        del job, tensors, result  # or they would be held until the next job comes
