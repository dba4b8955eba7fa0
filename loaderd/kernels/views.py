"""Views of memory, without a copy, as items at any byte."""

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
