"""The functions of a loader that the graph of a data set calls.

TensorFlow keeps the Python function of a ``numpy_function`` for ever. So these functions must not keep the loader
alive: the data set does, and so do its iterators and whatever is made of it.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import tensorflow as tf

from loaderd.client.batch import Batch
from loaderd.client.loader import Loader
from loaderd.client.shutdown import ProgramEnded, program_has_ended
from loaderd.errors import ClosedError, EmptyBatchError, LoaderdError
from loaderd_tf.graphs import keep_thread, let_go_of_arrays

_NO_END = np.iinfo(np.int64).max
_MOST_MISSED = 16


class GraphLoader:
    """The functions for ``loader``, whose batches are handed over as the arrays of the fields ``names``.

    ``pins``: whether a GPU may copy the batches, with or without a device that is theirs. TensorFlow keeps what a GPU
    copies until that is over.
    """

    def __init__(self, loader: Loader, names: tuple[str, ...], pins: bool) -> None:
        self._loader = weakref.ref(loader)
        self._names = names
        self._pins = pins
        self._pass_of = lru_cache(maxsize=16)(self._parse_pass)
        # By pass: the step of a batch that was not delivered, though it is not broken, and the last step asked for.
        self._missed: dict[bytes, tuple[int, int]] = {}

    def is_gone(self) -> bool:
        """Whether nobody keeps the loader any more."""
        return self._loader() is None

    def alive(self) -> Loader:
        """The loader. Raises ClosedError where it is gone, and ProgramEnded when the program has ended."""
        loader = self._loader()
        if program_has_ended():
            raise ProgramEnded
        if loader is None:
            raise ClosedError(
                "the data set of this iterator is gone", hint="Keep a reference to it while it is used."
            )
        return loader

    def num_passes(self, _: Any) -> int:
        """How many passes an iteration that begins now makes; 0 when the program has ended."""
        try:
            num_passes = self.alive()._num_passes
        except ProgramEnded:
            return 0
        return _NO_END if num_passes is None else num_passes

    def new_pass(self, _: Any) -> tuple[bytes, np.int64, np.int64]:
        """Begin a pass; returns it as text, and the range of steps to ask for, empty when the program has ended.

        The last of these steps is behind the last batch: there, :meth:`fetch` ends the pass, or names a lost batch.
        """
        try:
            loader = self.alive()
            pass_, step = loader._new_pass()
            num_steps = loader._num_steps(pass_)
        except ProgramEnded:
            return b"", np.int64(0), np.int64(0)
        text = loader._pass_to_json(pass_).encode()
        missed = self._missed.get(text)
        if missed is not None and step == missed[1] + 1:
            # A pass begins there only after load_state_dict(): the user leaves the missed batch out. For fetch, the
            # iterator that begins would look like the one that missed it.
            self._missed.pop(text, None)
        return text, np.int64(step), np.int64(_NO_END if num_steps is None else num_steps + 1)

    def begin(self, pass_text: Any) -> bytes:
        """Returns ``pass_text``. Called for each pass that an iterator begins, or is restored in.

        A restored pass may be one that this loader has not begun, and no batch of it may be left to be fetched: from
        here on, the next pass begins behind it. What is wrong with it is an error of its first batch: that of this
        function TensorFlow would tell in words of its own.
        """
        text: bytes = np.asarray(pass_text, object).item()  # tf.data's debug mode gives an array
        if text:
            with contextlib.suppress(ProgramEnded, LoaderdError):
                self._pass_of(text)
        return text

    def fetch(self, step: np.int64, pass_text: bytes) -> list[np.ndarray[Any, Any]]:
        """The arrays of batch ``step`` of a pass. Raises the error of a batch that cannot be delivered.

        After any error, TensorFlow's iterator goes on with the next step. If the batch itself is not broken, a
        loader's own iterator would ask for it again. TensorFlow's cannot, so all later steps of the pass are errors,
        too: no batch may be missing without a word.

        Raises StopIteration behind the last batch, and when the program ends: an error would be printed then, and an
        iterator that goes on calling could not be destroyed.
        """
        loader = self._loader()
        if loader is None:  # the iterator is being destroyed; its data set is gone already
            raise StopIteration
        keep_thread()
        let_go_of_arrays()  # or earlier batches would keep slots that this one needs
        try:
            batch = self._fetch(loader, int(step), pass_text)
        except ProgramEnded:
            raise StopIteration from None
        if batch is None:
            raise StopIteration
        if self._pins:
            batch._pin()
        return [batch[name] for name in self._names]

    def fetch_flagged(self, step: np.int64, pass_text: bytes) -> list[Any]:
        """As :meth:`fetch`; behind the arrays, whether they have any records."""
        arrays = self.fetch(step, pass_text)
        return [*arrays, np.bool_(len(arrays[0]) > 0)]

    def _fetch(self, loader: Loader, step: int, pass_text: bytes) -> Batch | None:
        pass_ = self._pass_of(pass_text)
        first, last = self._missed.get(pass_text, (step, step))
        if step == last + 1 and not loader.closed:
            self._missed[pass_text] = first, step
            raise ClosedError(
                f"batch {first} of this pass was not delivered, and an iterator of tf.data cannot go back to it",
                hint="Make another one that begins there: begin = loader.next_position() in front of the loop, "
                "loader.load_state_dict(loader.after(begin, batches)) after the error. Or restore a checkpoint of "
                "this one from before it.",
            )
        if step == last:
            self._missed.pop(pass_text, None)
        try:
            return loader._fetch(pass_, step)
        except EmptyBatchError:
            return self._empty_batch(loader)
        except BaseException as error:
            if not (isinstance(error, LoaderdError) and error.instead_of_batch):
                self._missed[pass_text] = step, step
                if len(self._missed) > _MOST_MISSED:
                    self._missed.pop(next(iter(list(self._missed))), None)
            raise

    def _empty_batch(self, loader: Loader) -> Batch:
        """A batch without records, which the data set leaves out: each step must have an element."""
        specs = loader.schema.specs
        return Batch({name: np.empty((0, *specs[name].shape), specs[name].dtype) for name in self._names})

    def _parse_pass(self, pass_text: bytes) -> Any:
        return self.alive()._pass_from_json(pass_text)

    def cardinality(self) -> tf.Tensor:
        """The cardinality of the data set at this moment, int64."""
        return tf.constant(cardinality(self.alive()), tf.int64)


def cardinality(loader: Loader) -> int:
    """The cardinality of a data set of ``loader``: batches of its next iteration, as far as that is known."""
    if loader._grows and loader._num_passes is not None:
        return int(tf.data.UNKNOWN_CARDINALITY)
    try:
        return loader.batches_left
    except TypeError:
        return int(tf.data.INFINITE_CARDINALITY)
