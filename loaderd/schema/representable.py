"""Values that users give: which of them a dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Complex, Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError

Number = int | float


def as_number(value: Any, what: str) -> Number:
    """A number, also one of numpy's, as a Python int or float. Raises SchemaError.

    An int stays exact, unless it has more than 64 bits: no dtype of integers holds it then, and no message.
    """
    if not isinstance(value, Real) or isinstance(value, np.timedelta64):  # which numpy counts among the integers
        raise SchemaError(f"{what} must be a number, got {value!r:.200}")
    try:
        as_float = float(value)
    except OverflowError:
        raise SchemaError(f"{what} must be a number that float64 can hold, got a larger one") from None
    return int(value) if isinstance(value, Integral) and -(2**63) <= int(value) < 2**64 else as_float


def holds_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is of numbers or bool: numpy's, or those of ml_dtypes, whose kind is "V" as that of bytes."""
    return dtype.kind in "biufcV" and not issubclass(dtype.type, np.void)


def check_holds_numbers(dtype: np.dtype[Any], what: str) -> None:
    """Raise SchemaError unless ``dtype`` is of numbers or bool."""
    if not holds_numbers(dtype):
        raise SchemaError(f"{what} needs a dtype of numbers, got {dtype}")


def check_holds_fractions(dtype: np.dtype[Any], what: str) -> None:
    """Raise SchemaError for a ``dtype`` of integers, in which fractions would become 0."""
    if integer_limits(dtype) is not None:
        raise SchemaError(f"{what} must hold fractions, got {dtype}")


def check_representable(numbers: Sequence[Number], dtype: np.dtype[Any], what: str) -> None:
    """Raise SchemaError for a number that ``dtype`` cannot hold: exactly, if it is of integers; else rounded."""
    check_holds_numbers(dtype, what)
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


def as_plain(given: Any) -> Any:
    """``given`` without arrays and tensors: as lists of Python's values, so that no worker imports their library.

    Dates stay numpy's, each with its unit: Python has none for nanoseconds, and would make integers of them.
    """
    if isinstance(given, (list, tuple)):
        return [as_plain(each) for each in given]
    if not hasattr(given, "__array__"):
        return given
    array = np.asarray(given)
    if array.dtype.kind in "mM":
        return [as_plain(each) for each in array] if array.ndim else array[()]
    return array.tolist()


def as_values(given: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    """``given``, by a user, as an array of ``dtype`` and ``shape``. Raises SchemaError where it does not fit."""
    if holds_numbers(dtype):
        check_representable(_numbers_in(given, dtype, what), dtype, what)
    try:
        full = np.broadcast_to(np.asarray(given, dtype=dtype), shape)
        if _is_changed(given, dtype):
            raise ValueError(f"{given!r:.200} would become another value")
    except (ValueError, TypeError, OverflowError) as error:
        raise SchemaError(f"{what} must fit {dtype} of shape {shape}: {error}") from None
    return full


def _numbers_in(given: Any, dtype: np.dtype[Any], what: str) -> list[Number]:
    """All numbers in ``given``, and both parts of complex ones if ``dtype`` is complex. Raises SchemaError."""
    numbers = []
    for value in np.asarray(given, object).ravel().tolist():
        if isinstance(value, list):  # among lists of other lengths, of which numpy says what is wrong
            continue
        is_complex = dtype.kind == "c" and isinstance(value, Complex)
        numbers += [as_number(part, what) for part in ((value.real, value.imag) if is_complex else (value,))]
    return numbers


def _is_changed(given: Any, dtype: np.dtype[Any]) -> bool:
    """Whether text or dates become others in ``dtype``. Raises ValueError or TypeError for what is neither."""
    if not np.size(given):
        return False
    kind = np.asarray(given).dtype.kind
    if dtype.kind in "SU":
        return kind not in "SU" or np.asarray(given, dtype.kind).dtype.itemsize > dtype.itemsize
    if dtype.kind not in "mM" or kind in "iu":  # integers count in the unit of dtype
        return False
    if kind in "mM" and kind != dtype.kind:
        return True
    exact = np.asarray(given, dtype.kind + "8")
    again = exact.astype(dtype).astype(exact.dtype)
    return not ((again == exact) | (np.isnat(again) & np.isnat(exact))).all()
