"""What becomes of stored values, and which keep their meaning: integers, dates and text must fit their dtype.

Floats round, and what is too large for them becomes infinite, as in TensorFlow; anything becomes bool: whether it is
not 0. But an integer that wraps round, a fraction or text that is cut off, and NaN as an integer are mistakes that
nobody sees in a batch, so they are errors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema.representable import Number, in_dtype, integer_limits

AnyArray = npt.NDArray[Any]


def is_cast(stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether the cast is possible and makes sense, whatever the values are."""
    if stored == dtype:
        return True
    if any(issubclass(each.type, np.void) for each in (stored, dtype)):
        return False
    are_text = [each.kind in "SU" for each in (stored, dtype)]
    if any(are_text):
        return all(are_text) and np.can_cast(stored, dtype)
    if stored.kind == "c" and dtype.kind not in "cb":
        return False
    return np.can_cast(stored, dtype, "unsafe")


def is_shaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the values of an array of ``shape`` are those of one of ``wanted``: axes of length 1 don't count."""
    return shape == wanted or [dim for dim in shape if dim != 1] == [dim for dim in wanted if dim != 1]


class ExactCast:
    """Finds values of dtype ``stored`` of which ``cast(value) * scale + offset`` is not exact in ``dtype``.

    ``is_needed``: whether there can be any.
    """

    def __init__(
        self, stored: np.dtype[Any], dtype: np.dtype[Any], scale: Number | None = None, offset: Number | None = None
    ) -> None:
        self._dtype, self._scale, self._offset = dtype, scale, offset
        self._limits: tuple[int, int] | None = None
        """Of numbers, the least and the largest that are right; None: casting there and back shows it."""
        if stored.kind in "SU":
            self.is_needed = not np.can_cast(stored, dtype, "safe")
            return
        if stored.kind in "mM" and dtype.kind == stored.kind:
            # To a coarser unit, dates are rounded down, as the unit says.
            self.is_needed = stored != dtype and np.can_cast(stored, dtype, "safe")
            return
        limits = _limits_of(dtype)
        if dtype.kind == "b" or limits is None:
            self.is_needed = False
            return
        least, largest = _preimage(limits, 1 if scale is None else int(scale), 0 if offset is None else int(offset))
        has = self._has = _limits_of(stored)
        self.is_needed = has is None or has[0] < least or has[1] > largest
        # numpy compares with what the dtype holds
        self._limits = (least, largest) if has is None else (max(least, has[0]), min(largest, has[1]))

    @property
    def expected(self) -> str:
        """In words, the values that come out right."""
        if self._limits is None:
            return f"values that {self._dtype} holds"
        scaled = "" if self._scale is None else f" * {self._scale}"
        scaled += "" if self._offset is None else f" + {self._offset}"
        holds = f"of which value{scaled} is within {self._dtype}" if scaled else f"which {self._dtype} holds"
        kind = "whole numbers" if self._has is None else "values"
        return f"{kind} from {self._limits[0]} to {self._limits[1]}, {holds}"

    def find_lost(self, values: AnyArray) -> str:
        """As text, one of ``values``, of dtype ``stored``, that would be changed; "" if there is none."""
        if not self.is_needed or self._surely_fit(values):
            return ""
        lost = self._is_lost(values)
        return text_of(values[lost][0]) if lost.any() else ""

    def _surely_fit(self, values: AnyArray) -> bool:
        """None is above all their bits together, unless one is below 0: this takes half the time."""
        if self._limits is None or values.dtype.kind not in "iu":
            return False
        least, largest = self._limits
        return least <= 0 <= int(np.bitwise_or.reduce(values, axis=None)) <= largest

    def _is_lost(self, values: AnyArray) -> AnyArray:
        if self._limits is None:
            changed: AnyArray = values.astype(self._dtype).astype(values.dtype) != values
            return changed & ~np.isnat(values) if values.dtype.kind in "mM" else changed  # NaT is not equal to itself
        least, largest = self._limits
        if self._has is None:
            return ~_is_whole_within(values.astype(np.float64), least, largest)
        numbers = values.view(np.int64) if values.dtype.kind in "mM" else values
        if numbers.dtype.kind == "V":  # of ml_dtypes, which does not compare with Python's integers
            numbers = numbers.astype(np.int8)
        outside: AnyArray = (numbers < least) | (numbers > largest)
        return outside


class ArrayValues:
    """What an ``Array`` makes of stored values: ``cast(value) * scale + offset``, each step in ``dtype``."""

    def __init__(
        self, stored: np.dtype[Any], dtype: np.dtype[Any], scale: Number | None, offset: Number | None, wrap: bool
    ) -> None:
        exact = ExactCast(stored, dtype, scale, offset)
        self.checked: ExactCast | None = exact if exact.is_needed and not wrap else None
        """What finds values that ``dtype`` does not hold; None: there are none, or they are to wrap."""
        self._scale = None if scale is None else in_dtype(scale, dtype)
        self._offset = None if offset is None else in_dtype(offset, dtype)

    def put(self, stored: AnyArray, out: AnyArray) -> None:
        """Write what becomes of ``stored``, of dtype ``stored``, to ``out``, of ``dtype`` and the same shape."""
        with np.errstate(all="ignore"):  # what is too large becomes infinite, as in TensorFlow, without a warning
            out[...] = stored
            if self._scale is not None:
                np.multiply(out, self._scale, out=out)
            if self._offset is not None:
                np.add(out, self._offset, out=out)


class SpreadValues:
    """What a ``Spread`` makes of stored values: value · ``scale`` in float64, cast to ``dtype`` once.

    Integers times a whole scale are computed in integers, as float64 does not hold all of them.
    """

    def __init__(self, stored: np.dtype[Any], dtype: np.dtype[Any], scale: float) -> None:
        self._dtype, self._scale = dtype, scale
        self._limits = None if dtype.kind == "b" else integer_limits(dtype)
        is_whole = scale.is_integer() and abs(scale) < 2**63
        is_exact = is_whole and self._limits is not None and integer_limits(stored) is not None
        self._exact = ExactCast(stored, dtype, int(scale)) if is_exact else None

    def of(self, stored: AnyArray) -> AnyArray:
        if self._exact is not None:
            exact: AnyArray = (stored.astype(np.int64) * np.int64(self._scale)).astype(self._dtype)
            return exact
        with np.errstate(all="ignore"):
            rounded: AnyArray = self._in_floats(stored).astype(self._dtype)
        return rounded

    def _in_floats(self, stored: AnyArray) -> AnyArray:
        return stored.astype(np.float64) * self._scale

    def find_lost(self, stored: AnyArray) -> str:
        """As text, one of ``stored`` that a dtype of integers does not hold once scaled; "" if there is none."""
        if self._exact is not None:
            return self._exact.find_lost(stored)
        if self._limits is None:
            return ""
        least, largest = self._limits
        with np.errstate(all="ignore"):
            scaled = np.trunc(self._in_floats(stored))
        is_lost = ~((scaled >= least) & (scaled < float(largest + 1)))
        return text_of(stored[is_lost][0]) if is_lost.any() else ""


def _limits_of(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """As :func:`integer_limits`, and of dates those of the integer that each is, without NaT."""
    return (-(2**63) + 1, 2**63 - 1) if dtype.kind in "mM" else integer_limits(dtype)


def text_of(value: Any) -> str:
    """A value of an array, for a message."""
    return f"{value.item()!r:.100}" if isinstance(value, (np.bytes_, np.str_)) else f"{value!s:.100}"


def _preimage(limits: tuple[int, int], scale: int, offset: int) -> tuple[int, int]:
    """The integers of which ``n * scale + offset`` is within ``limits``. Arithmetic that wraps is right for these."""
    least, largest = limits[0] - offset, limits[1] - offset
    if scale == 0:
        return -(2**64), 2**64
    if scale < 0:
        least, largest, scale = -largest, -least, -scale
    return -(-least // scale), largest // scale


def _is_whole_within(numbers: npt.NDArray[np.float64], least: int, largest: int) -> AnyArray:
    inside = (numbers >= _float_within(least, math.inf)) & (numbers <= _float_within(largest, -math.inf))
    is_whole: AnyArray = inside & (np.trunc(numbers) == numbers)
    return is_whole


def _float_within(limit: int, towards: float) -> float:
    """``limit`` as a float64, or the next one ``towards`` an infinity where float64 does not have it."""
    number = float(limit)
    is_outside = number < limit if towards > 0 else number > limit
    return math.nextafter(number, towards) if is_outside else number
