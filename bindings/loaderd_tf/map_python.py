"""Data sets of what a Python function returns: one call an element, in the thread that takes the element.

``Dataset.map`` hands each call to a pool of threads and waits for it; the pool's other threads look for work
meanwhile. That costs half as much again as the call itself, so here the thread that takes the element makes the call.
An attribute of the operation behind ``map`` asks for that, so this module uses the operation directly.

The tensors of an element alias the arrays that the function returned. A ``tf.numpy_function`` converts each array to
an array first, and looks up the version of numpy each time: with three fields, that takes a third of a call.
TensorFlow's own way for functions that return tensors does not. It is not public, so it is tried before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from loaderd_tf.graphs import check_process, unconverted


def call_for_each(
    numbers: tf.data.Dataset,
    function: Callable[..., Sequence[np.ndarray[Any, Any]]],
    arguments: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
    element: Callable[[Sequence[Any]], Any],
) -> tf.data.Dataset:
    """A data set of ``element(function(number, *arguments))`` for each of ``numbers``, int64.

    ``function`` returns an array for each of ``specs`` (batch dimension included); TensorFlow copies an array that
    does not start at a multiple of 64 bytes. If ``function`` raises StopIteration, the data set ends; after any other
    exception, the next call is for the next number. ``element`` makes nested tuples and dicts of a sequence; it is
    called with sequences of other things than tensors, too.
    """
    structure = element(specs)
    order = tf.nest.flatten(element(range(len(specs))))
    dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]

    def call(*inputs: tf.Tensor) -> list[tf.Tensor]:
        returned = _returned(function, inputs, dtypes)
        for tensor, shape in zip(returned, shapes, strict=True):
            tensor.set_shape(shape)
        return [returned[place] for place in order]

    traced = tf.function(call, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int64), *(tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments)
    )
    elements = tf.raw_ops.MapDataset(
        input_dataset=tf.data.experimental.to_variant(numbers),
        other_arguments=list(arguments),
        f=traced,
        output_types=[dtypes[place] for place in order],
        output_shapes=[shapes[place] for place in order],
        use_inter_op_parallelism=False,
        force_synchronous=True,  # else TensorFlow calls ahead, in several threads
    )
    return tf.data.experimental.from_variant(elements, structure)


def _returned(
    function: Callable[..., Sequence[np.ndarray[Any, Any]]], inputs: Sequence[Any], dtypes: Sequence[tf.DType]
) -> Sequence[tf.Tensor]:
    """What ``function(*inputs)`` returns when the graph runs. If it had state, no iterator could be saved."""
    if not _has_direct_calls():
        return list(tf.numpy_function(function, inputs, dtypes, stateful=False))
    return list(_called_directly(function, inputs, dtypes))


def _called_directly(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[tf.DType]) -> Any:
    from tensorflow.python.ops import script_ops

    class Direct(script_ops.EagerFunc):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __call__(self, device: Any, token: Any, arguments: Sequence[Any]) -> Any:
            return function(*arguments)

    direct = Direct()
    _kept.append(direct)
    return tf.raw_ops.PyFuncStateless(input=inputs, token=script_ops._py_funcs.insert(direct), Tout=dtypes)


_kept: list[Any] = []
"""Kept for ever, as is that of a ``tf.numpy_function``: nothing tells when a graph calls one for the last time."""


@cache
def _has_direct_calls() -> bool:
    try:
        with tf.init_scope():
            (returned,) = _called_directly(lambda number: [number + np.arange(3)], [np.int64(4)], [tf.int64])
        return bool((returned.numpy() == [4, 5, 6]).all())
    except Exception:  # whatever has changed in TensorFlow
        return False


def while_true(dataset: tf.data.Dataset, goes_on: Callable[[], bool]) -> tf.data.Dataset:
    """``dataset``, which is of numbers, until ``goes_on()``, called for each of them, is false."""
    answer = unconverted(lambda _: np.bool_(goes_on()))

    def asked(number: tf.Tensor) -> tf.Tensor:
        # The call needs an input: without one, TensorFlow takes its result for a constant, and calls once.
        with tf.control_dependencies([check_process()]):
            return tf.ensure_shape(tf.numpy_function(answer, [number], tf.bool, stateful=False), [])

    return dataset.take_while(asked)
