"""Several batches for each call of Python out of a tf.data graph.

A call of a Python function from a graph costs 200 to 350 µs of CPU, whatever it returns; as much as unpacking 512
chess boards. So one call, a **hop**, takes several batches, and what hands them on one by one does no computation::

    first steps  0, 4, 8, …  ──hop──►  from_tensors(batch 0) ++ from_tensors(batch 1) ++ … ++ single steps

The tensors alias the slots all the way. A hop ends in front of a batch that cannot be delivered: that one and those
behind it are fetched singly, so that an error comes in its turn and costs no other batch. What an iterator holds,
and a checkpoint of it saves, is the hop's first step and how many of its batches are used up.

All batches of a hop are held until the last of them is used up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from loaderd import Schema
from loaderd.errors import LoaderdError

MAX_HOP_BATCHES = 4
_MAX_HOP_BYTES = 16 << 20

Arrays = list[np.ndarray[Any, Any]]


def batches_per_hop(schema: Schema, batch_size: int) -> int:
    """How many batches a hop takes: of large ones fewer, for they are held and cost less by the example anyway."""
    batch_bytes = batch_size * schema.record_bytes
    return max(1, min(MAX_HOP_BATCHES, _MAX_HOP_BYTES // batch_bytes))


@dataclass(frozen=True)
class Hops:
    """The batches of a pass, ``size`` of them a hop.

    ``fetch(which, step)`` returns the arrays of a batch, one for each of ``specs`` (batch dimension included); each
    must start at a multiple of 64 bytes, else TensorFlow copies it. It must answer any step, and the same each time.
    ``element`` makes an element of the data set of the tensors of a batch.
    """

    fetch: Callable[[bytes, int], Arrays]
    element: Callable[[list[tf.Tensor]], Any]
    specs: list[tf.TensorSpec]
    size: int

    def dataset(self, which: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        """The elements of steps ``begin`` to ``end - 1`` of a pass: scalars of string, int64 and int64."""
        firsts = tf.data.Dataset.range(begin, end, self.size)
        return firsts.flat_map(lambda first: self._hop(which, first, end))

    def _hop(self, which: tf.Tensor, first: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        stop = first + tf.minimum(tf.constant(self.size, tf.int64), end - first)  # the end may be the largest int64
        dtypes = [spec.dtype for spec in self.specs]
        count, *tensors = _call(self._fetch_many, [which, first, stop], [tf.int64, *dtypes * self.size])
        count.set_shape([])
        num = len(dtypes)
        batches = [
            tf.data.Dataset.from_tensors(self._shaped(tensors[begin : begin + num]))
            for begin in range(0, len(tensors), num)
        ]
        together = functools.reduce(lambda front, back: front.concatenate(back), batches).take(count)
        return together.concatenate(
            tf.data.Dataset.range(first + count, stop).map(
                lambda step: self._shaped(_call(self._fetch_one, [which, step], dtypes))
            )
        )

    def _fetch_many(self, which: Any, first: Any, stop: Any) -> list[Any]:
        # TensorFlow lets go of the arrays of the hop before only when an eager tensor is deleted: now, or their slots
        # would be missing for this one.
        tf.constant(0)
        found: Arrays = []
        count = 0
        try:
            for step in range(int(first), int(stop)):
                found += self.fetch(bytes(which), step)
                count += 1
        except LoaderdError:
            pass  # it comes again when that step is fetched by itself
        # The graph wants so many arrays of those shapes; what stands in for the missing ones is never looked at.
        filler = found[-len(self.specs) :] or [
            np.empty([dim or 0 for dim in spec.shape], spec.dtype.as_numpy_dtype) for spec in self.specs
        ]
        return [np.int64(count), *found, *filler * (self.size - count)]

    def _fetch_one(self, which: Any, step: Any) -> Arrays:
        return self.fetch(bytes(which), int(step))

    def _shaped(self, tensors: list[tf.Tensor]) -> Any:
        for tensor, spec in zip(tensors, self.specs, strict=True):
            tensor.set_shape(spec.shape)
        return self.element(tensors)


def _call(function: Callable[..., Any], inputs: list[tf.Tensor], dtypes: list[tf.DType]) -> list[tf.Tensor]:
    """``tf.numpy_function``; without autograph, which would translate our Python and cost 30 µs a call."""
    tensors: list[tf.Tensor] = tf.numpy_function(
        tf.autograph.experimental.do_not_convert(function), inputs, dtypes, stateful=False
    )
    return tensors
