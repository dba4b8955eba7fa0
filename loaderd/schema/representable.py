"""Numbers that users give: which of them a dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError

Number = int | float


def as_number(value: Any, what: str) -> Number:
    """A number, also one of numpy's, as a Python int or float; an int stays exact. Raises SchemaError."""
    if not isinstance(value, Real):
        raise SchemaError(f"{what} must be a number, got {value!r:.200}")
    try:
        as_float = float(value)
    except OverflowError:
        raise SchemaError(f"{what} must be a number that float64 can hold, got a larger one") from None
    return int(value) if isinstance(value, Integral) else as_float


def check_representable(numbers: Sequence[Number], dtype: np.dtype[Any], what: str) -> None:
    """Raise SchemaError for a number that ``dtype`` cannot hold: exactly, if it is of integers; else rounded."""
    if dtype.kind not in "biufcV" or dtype.type is np.void:
        raise SchemaError(f"{what} needs a dtype of numbers, got {dtype}")
    limits = integer_limits(dtype)
    if limits is not None:
        least, largest = limits
        wrong = [number for number in numbers if not (least <= number <= largest and number == int(number))]
        hint = f"{dtype} holds whole numbers from {least} to {largest}."
    else:
        exact = np.array(numbers, np.float64)
        with np.errstate(all="ignore"):
            held = exact.astype(dtype)
        becomes_another = (np.isfinite(exact) != np.isfinite(held)) | (np.isnan(exact) != np.isnan(held))
        wrong = [numbers[place] for place in np.flatnonzero(becomes_another).tolist()]
        hint = f"In {dtype} it would become {held[becomes_another][0]}." if wrong else ""
    if wrong:
        raise SchemaError(f"{what} must be representable in {dtype}, got {wrong[0]!r:.200}", hint=hint)


def in_dtype(numbers: Number | Sequence[Number], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The numbers as ``dtype``: by way of float64, except for integers, which float64 may not hold exactly."""
    return np.array(numbers, dtype if dtype.kind in "iu" else np.float64).astype(dtype)


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """The least and the largest number of a dtype of integers, or of bool; None for any other."""
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "V" and dtype.name.startswith(("int", "uint")):
        import ml_dtypes

        return int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    return None
