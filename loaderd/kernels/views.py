"""Memory as items at any byte, without a copy; and the places of stretches of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def items_at(memory: npt.NDArray[np.uint8], size: int, offset: int = 0, stride: int = 1) -> npt.NDArray[np.void]:
    """void of ``size`` bytes, (n,): the first at byte ``offset``, each next one ``stride`` bytes on, while they fit.

    To gather or put void items is one memcpy an item; rows of a two-dimensional view cost five times that.
    """
    count = max(0, (memory.size - offset - size) // stride + 1)
    items: npt.NDArray[np.void] = np.ndarray((count,), f"V{size}", memory.data, offset, (stride,))
    return items


def places_within(starts: npt.NDArray[np.int64] | int, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64, (sum of sizes,): ``start``, ``start + 1`` … of each stretch, one stretch after the other."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
