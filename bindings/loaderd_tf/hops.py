"""Several batches for each call of Python out of a tf.data graph.

A call of a Python function from a graph costs 200 to 350 µs of CPU, whatever it returns; as much as unpacking 512
chess boards. So one call, a **hop**, takes several batches, and what hands them on one by one does no computation::

    chunks  0, 32, …  ──►  first steps  0, 4, 8, …  ──hop──►  from_tensors(batch 0) ++ … ++ single steps

The tensors alias the slots all the way. A hop ends in front of a batch that cannot be delivered: that one and those
behind it are fetched singly, so that an error comes in its turn and costs no other batch. What an iterator holds,
and a checkpoint of it saves, is the hop's first step and how many of its batches are used up.

All batches of a hop are held until the last of them is used up.

When the program ends, so does the data set: a hop is empty from then on, and no chunk comes behind this one. An error
in the place of that end would be printed, and an iterator that goes on calling us could not be destroyed (see
``loaderd.client.end``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from loaderd import Schema
from loaderd.client.end import ProgramEnds
from loaderd.errors import LoaderdError
from loaderd_tf.graphs import check_process, unconverted

MAX_HOP_BATCHES = 4
_MAX_HOP_BYTES = 16 << 20
_CHUNK_HOPS = 8

Arrays = list[np.ndarray[Any, Any]]


def batches_per_hop(schema: Schema, batch_size: int) -> int:
    """How many batches a hop takes: of large ones fewer, for they are held and cost less by the example anyway."""
    batch_bytes = batch_size * schema.record_bytes
    return max(1, min(MAX_HOP_BATCHES, _MAX_HOP_BYTES // batch_bytes))


@dataclass(frozen=True)
class Hops:
    """The batches of a pass, ``size`` of them a hop.

    ``fetch(which, step, wanted)`` returns the arrays of a batch, one for each of ``specs`` (batch dimension
    included); each must start at a multiple of 64 bytes, else TensorFlow copies it. It must answer any step, and the
    same each time. ``wanted``: how many are asked for before any is used, with this one.
    ``element`` makes an element of the data set of the tensors of a batch. No step comes when ``is_over()``.
    """

    fetch: Callable[[bytes, int, int], Arrays]
    element: Callable[[list[tf.Tensor]], Any]
    specs: list[tf.TensorSpec]
    size: int
    is_over: Callable[[], bool]

    def dataset(self, which: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        """The elements of steps ``begin`` to ``end - 1`` of a pass: scalars of string, int64 and int64."""
        chunks = while_true(tf.data.Dataset.range(begin, end, _CHUNK_HOPS * self.size), lambda: not self.is_over())

        def hops(start: tf.Tensor) -> tf.data.Dataset:
            firsts = tf.data.Dataset.range(start, _up_to(start, _CHUNK_HOPS * self.size, end), self.size)
            return firsts.flat_map(lambda first: self._hop(which, first, _up_to(first, self.size, end)))

        return chunks.flat_map(hops)

    def _hop(self, which: tf.Tensor, first: tf.Tensor, stop: tf.Tensor) -> tf.data.Dataset:
        dtypes = [spec.dtype for spec in self.specs]
        count, rest, *tensors = _call(
            self._fetch_many, [which, first, stop], [tf.int64, tf.int64, *dtypes * self.size]
        )
        num = len(dtypes)
        batches = [
            tf.data.Dataset.from_tensors(self._shaped(tensors[begin : begin + num]))
            for begin in range(0, len(tensors), num)
        ]
        together = functools.reduce(lambda front, back: front.concatenate(back), batches).take(
            tf.ensure_shape(count, [])
        )
        singles = tf.data.Dataset.range(tf.ensure_shape(rest, []), stop)
        return together.concatenate(singles.flat_map(lambda step: self._single(which, step)))

    def _single(self, which: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        count, *tensors = _call(self._fetch_one, [which, step], [tf.int64, *(spec.dtype for spec in self.specs)])
        return tf.data.Dataset.from_tensors(self._shaped(tensors)).take(tf.ensure_shape(count, []))

    def _fetch_many(self, which: Any, first: Any, stop: Any) -> list[Any]:
        """How many batches there are, the step from which on to fetch singly, and ``size`` batches' arrays."""
        # TensorFlow lets go of the arrays of the hop before only when an eager tensor is deleted: now, or their slots
        # would be missing for this one.
        tf.constant(0)
        found: Arrays = []
        count = 0
        rest = stop
        text = _text(which)
        try:
            for step in range(int(first), int(stop)):
                found += self.fetch(text, step, int(stop) - step)
                count += 1
        except ProgramEnds:
            pass
        except LoaderdError:
            rest = first + count  # it comes again when that step is fetched by itself
        return [np.int64(count), rest, *found, *self._missing() * (self.size - count)]

    def _fetch_one(self, which: Any, step: Any) -> list[Any]:
        """Whether there is a batch, 1 or 0, and its arrays."""
        try:
            return [np.int64(1), *self.fetch(_text(which), int(step), 1)]
        except ProgramEnds:
            return [np.int64(0), *self._missing()]

    def _missing(self) -> Arrays:
        """What stands in for a batch that is not there, in the shapes that the graph wants; nobody looks at it."""
        return [np.empty([dim or 0 for dim in spec.shape], spec.dtype.as_numpy_dtype) for spec in self.specs]

    def _shaped(self, tensors: list[tf.Tensor]) -> Any:
        for tensor, spec in zip(tensors, self.specs, strict=True):
            tensor.set_shape(spec.shape)
        return self.element(tensors)


def _text(which: Any) -> bytes:
    """A string as Python gets it: bytes out of a graph; an array of one, where functions run eagerly."""
    text: bytes = np.asarray(which).item()
    return text


def while_true(dataset: tf.data.Dataset, goes_on: Callable[[], bool]) -> tf.data.Dataset:
    """``dataset``, numbers, to the one before which ``goes_on()`` is false."""
    answer = unconverted(lambda _: np.bool_(goes_on()))

    def asked(number: tf.Tensor) -> tf.Tensor:
        # It needs an input: without one TensorFlow takes it for a constant, and asks once.
        with tf.control_dependencies([check_process()]):
            return tf.ensure_shape(tf.numpy_function(answer, [number], tf.bool, stateful=False), [])

    return dataset.take_while(asked)


def _up_to(start: tf.Tensor, count: int, end: tf.Tensor) -> tf.Tensor:
    """``start + count``, but no more than ``end``, which may be the largest int64."""
    return start + tf.minimum(tf.constant(count, tf.int64), end - start)


def _call(function: Callable[..., Any], inputs: list[tf.Tensor], dtypes: list[tf.DType]) -> list[tf.Tensor]:
    """``tf.numpy_function``; without autograph, which would translate our Python and cost 30 µs a call."""
    tensors: list[tf.Tensor] = tf.numpy_function(unconverted(function), inputs, dtypes, stateful=False)
    return tensors
