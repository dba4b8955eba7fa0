"""What the function of a :class:`Derived` field returns: found out by calling it with records of zeros.

It is called with two and with three records, so that a result whose later axes follow the number of records, as
``a[:, None] * b`` has them, is noticed before there are batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.randomness import RecordRandom
from loaderd.schema.c_function import CFunction
from loaderd.schema.exact import is_cast, is_shaped
from loaderd.schema.features import Shape, check_shape
from loaderd.schema.field_spec import FieldSpec
from loaderd.schema.fields import Derived

_NUM_RECORDS = (2, 3)
_HINT_UNTRIED = "Give the field both, shape=… and dtype=…: then its function is not called before there are records."


def try_out(what: str, definition: Derived, stream: str, spec_of: Callable[[str], FieldSpec]) -> Derived:
    """``definition`` with the shape and dtype that its function returns, where it leaves them out.

    ``what``: what the field is called in errors. ``stream``: the random one, if it draws from any. ``spec_of``: what
    an input looks like. Raises SchemaError where the function raises, or returns what cannot be a field.
    """
    if definition.shape is not None and definition.dtype is not None:
        return definition
    results = [_call(what, definition, stream, spec_of, count) for count in _NUM_RECORDS]
    shapes, dtypes = [result.shape[1:] for result in results], [result.dtype for result in results]
    returned = " and ".join(
        f"{result.dtype} of shape {result.shape} for {count} records"
        for result, count in zip(results, _NUM_RECORDS, strict=True)
    )
    if any(result.shape[:1] != (count,) for result, count in zip(results, _NUM_RECORDS, strict=True)):
        raise SchemaError(
            f"{what}: its function must return an array whose first axis is the records, but returned {returned}"
        )
    if len(set(shapes)) > 1:
        raise SchemaError(
            f"{what}: its function must return as many values for each record, but returned {returned}",
            hint="Two inputs may have been broadcast against each other.",
        )
    shape = _shape(what, definition, shapes[0], returned)
    return replace(definition, shape=shape, dtype=_dtype(what, definition, dtypes, returned))


def _call(
    what: str, definition: Derived, stream: str, spec_of: Callable[[str], FieldSpec], count: int
) -> npt.NDArray[Any]:
    inputs: list[Any] = []
    for name in definition.inputs:
        spec = spec_of(name)
        inputs.append(np.zeros((count, *spec.shape), spec.dtype))
        inputs[-1].flags.writeable = False
    if definition.random:
        inputs.append(RecordRandom(np.arange(count), stream))
    assert not isinstance(definition.function, CFunction)  # which has both, a shape and a dtype
    try:
        with np.errstate(all="ignore"):  # it may divide by its inputs
            return np.asarray(definition.function(*inputs))
    except Exception as error:
        unknown = " and ".join(name for name in ("shape", "dtype") if getattr(definition, name) is None)
        raise SchemaError(
            f"{what}: its function was called with {count} records of zeros, to learn its {unknown}, and raised "
            f"{type(error).__name__}: {error}",
            hint=_HINT_UNTRIED,
        ) from error


def _shape(what: str, definition: Derived, shape: Shape, returned: str) -> Shape:
    if definition.shape is None:
        return check_shape(shape, what)
    if not is_shaped(shape, definition.shape):
        raise SchemaError(
            f"{what}: its function must return shape {definition.shape} for each record, but returned {returned}",
            hint=f"Give the field shape={shape}, or leave shape out.",
        )
    return definition.shape


def _dtype(what: str, definition: Derived, dtypes: list[np.dtype[Any]], returned: str) -> np.dtype[Any]:
    first, *others = dtypes
    if definition.dtype is not None:
        dtype: np.dtype[Any] = definition.dtype
        if not (first.hasobject or is_cast(first, dtype) or {first.kind, dtype.kind} <= {"S", "U"}):
            raise SchemaError(f"{what}: its function must return what {dtype} can hold, but returned {returned}")
        return dtype
    if first.kind in "SU":
        raise SchemaError(
            f"{what} needs a dtype, as its function returned text, whose length may depend on the record",
            hint='Give the field the widest one, such as dtype="S16".',
        )
    if first.hasobject or first.type is np.void or others != [first] * len(others):
        raise SchemaError(f"{what} needs a dtype, as its function returned {returned}")
    return first
