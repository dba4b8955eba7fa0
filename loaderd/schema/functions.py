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


def same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both have the same code, equal defaults, equal values in their closures, and the same module."""
    try:
        return _same(one, other)
    except Exception:  # a function in its own closure, a variable without a value, or ``==`` of a user's class
        return False


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return all(map(_same, (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)))
    if isinstance(one, FunctionType):
        return one.__globals__ is other.__globals__ and all(map(_same, _seen_by(one), _seen_by(other)))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (float, complex, np.generic, np.ndarray)):
        return _same_array(np.asarray(one), np.asarray(other))
    return bool(one == other)


def _seen_by(function: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells


def _same_array(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    stored_alike = not one.dtype.hasobject and one.tobytes() == other.tobytes()  # so NaN equals NaN
    return stored_alike or np.array_equal(one, other)
