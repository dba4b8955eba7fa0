"""Values of a record, each taken from another place: which table of places applies is drawn for each record.

A ``Derived`` field whose function is ``partial(permute, draw, sources, inner)`` can be made behind a network or on a
device (``schema.packed``): its input travels as it is stored, and of what was drawn one byte a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
Sources = npt.NDArray[np.intp]
Draw = Callable[..., npt.NDArray[np.integer[Any]]]


def permute(draw: Draw, sources: Sources, inner: int, values: AnyArray, *others: Any) -> AnyArray:
    """:func:`permuted`, by the numbers, (n,), that ``draw(*others)`` gives.

    ``others``: further inputs of the field, and the RecordRandom.
    """
    return permuted(values, draw(*others), sources, inner)


def permuted(values: AnyArray, numbers: npt.NDArray[np.integer[Any]], sources: Sources, inner: int) -> AnyArray:
    """``values``, (n, …), in C order (n, outer, places, inner), with a record's places taken from others.

    Place i takes what place ``sources[numbers[record], i]`` had; -1: it becomes 0. ``sources``: (tables, places).
    """
    numbers = np.minimum(numbers, len(sources) - 1)  # they may have come from anywhere
    places, zero = sources.shape[1], np.zeros((), values.dtype)  # of text, 0 would be "0"
    size = math.prod(values.shape[1:])
    grouped = values.reshape(len(values), size // (places * inner), places, inner)
    is_moved = (sources != np.arange(places)).any(axis=1)
    if size == places * inner and len(sources) > 2 and 2 * np.count_nonzero(is_moved[numbers]) > len(numbers):
        chosen = sources[numbers]
        is_zero = chosen < 0
        chosen += np.arange(0, chosen.size, places)[:, None]
        taken: AnyArray = values.reshape(chosen.size, inner).take(chosen.ravel(), axis=0, mode="clip")
        if is_zero.any():
            taken[is_zero.ravel()] = zero
        return taken.reshape(values.shape)
    # All records of one table at a time: an index for each value would take eight times the bytes of the values. And
    # where most records stay as they are, they are copied at once.
    result = np.empty_like(grouped) if is_moved.all() else grouped.copy()
    for number in np.nonzero(is_moved)[0]:
        (records,) = np.nonzero(numbers == number)
        if len(records):
            moved = grouped[records].take(sources[number], axis=2, mode="clip")
            moved[:, :, sources[number] < 0] = zero
            result[records] = moved
    return result.reshape(values.shape)


def permutation_of(function: Callable[..., Any]) -> tuple[Draw, Sources, int] | None:
    """(draw, sources, inner) of a ``partial(permute, …)``; None: it is another function."""
    if not (isinstance(function, partial) and function.func is permute and len(function.args) == 3):
        return None
    draw, sources, inner = function.args
    return draw, sources, inner
