"""Whether two functions of a user do the same, although they are two objects.

A schema that is made twice by the same program has lambdas that were made twice. They do the same if they have the
same code and see equal values; NaN equals NaN. Functions of which that is not certain count as different.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt


def same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both have the same code, equal defaults, equal values in their closures, and the same module."""
    try:
        return _same_function(one, other)
    except RecursionError:  # a function that is in its own closure
        return False


def _same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    if one is other:
        return True
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return _same_function(one.func, other.func) and _same((one.args, one.keywords), (other.args, other.keywords))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__globals__ is other.__globals__ and _same(_seen_by(one), _seen_by(other))
    return _same(one, other)


def _seen_by(function: FunctionType) -> tuple[Any, ...]:
    try:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a variable of the closure has no value yet
        return (function,)
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (float, complex, np.generic, np.ndarray)):
        return _same_array(np.asarray(one), np.asarray(other))
    if isinstance(one, (FunctionType, functools.partial)):
        return _same_function(one, other)
    try:
        return bool(one == other)
    except Exception:  # whatever ``==`` of a user's class raises, they are not known to be equal
        return False


def _same_array(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    stored_alike = not one.dtype.hasobject and one.tobytes() == other.tobytes()  # so NaN equals NaN
    return stored_alike or np.array_equal(one, other)
