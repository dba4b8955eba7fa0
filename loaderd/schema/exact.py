"""Which values keep their meaning when they are cast: those that are to become integers, dates or text must fit.

Floats round, and what is too large for them becomes infinite, as in TensorFlow; anything becomes bool: whether it is
not 0. But an integer that wraps round, a fraction or text that is cut off, and NaN as an integer are mistakes that
nobody sees in a batch, so they are errors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema.representable import Number, integer_limits

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
        self._stored, self._dtype, self._scale, self._offset = stored, dtype, scale, offset
        self._limits: tuple[int, int] | None = None
        if stored.kind in "mM" and dtype.kind == stored.kind:
            # To a coarser unit, dates are rounded down, as the unit says.
            self.is_needed = stored != dtype and np.can_cast(stored, dtype, "safe")
            return
        if stored.kind in "SU":
            self.is_needed = not np.can_cast(stored, dtype, "safe")
            return
        limits = (-(2**63) + 1, 2**63 - 1) if dtype.kind in "mM" else integer_limits(dtype)
        if dtype.kind == "b" or limits is None:
            self.is_needed = False
            return
        self._limits = _preimage(limits, 1 if scale is None else int(scale), 0 if offset is None else int(offset))
        has = self._has = (-(2**63), 2**63 - 1) if stored.kind in "mM" else integer_limits(stored)
        self.is_needed = has is None or has[0] < self._limits[0] or has[1] > self._limits[1]
        if has is not None:  # numpy compares with what the dtype holds
            self._limits = max(self._limits[0], has[0]), min(self._limits[1], has[1])

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
        if not self.is_needed or not values.size:
            return ""
        if self._limits is None:
            lost = values.astype(self._dtype).astype(values.dtype) != values
            if values.dtype.kind in "mM":  # NaT is not equal to itself
                lost &= ~np.isnat(values)
        else:
            least, largest = self._limits
            numbers = values.view(np.int64) if values.dtype.kind in "mM" else values
            if self._has is not None:
                if numbers.dtype.kind == "V":  # of ml_dtypes, which cannot find the least of them
                    numbers = numbers.astype(np.int8)
                # None is above all their bits together, unless one is below 0: this takes half the time.
                if least <= 0 <= int(np.bitwise_or.reduce(numbers, axis=None)) <= largest:
                    return ""
                if int(numbers.min()) >= least and int(numbers.max()) <= largest:
                    return ""
                lost = (numbers < least) | (numbers > largest)
            else:
                numbers = numbers.astype(np.float64)
                inside = (numbers >= _float_within(least, math.inf)) & (numbers <= _float_within(largest, -math.inf))
                lost = ~(inside & (np.trunc(numbers) == numbers))
        return text_of(values[lost][0]) if lost.any() else ""


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


def _float_within(limit: int, towards: float) -> float:
    """``limit`` as a float64, or the next one ``towards`` an infinity where float64 does not have it."""
    number = float(limit)
    is_outside = number < limit if towards > 0 else number > limit
    return math.nextafter(number, towards) if is_outside else number
