"""Memory behind which nothing may be touched: there is a page that ends the process that tries.

Compiled code looks at no bounds, so what is given to it in tests lies here.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_PROT_NONE = 0


def guarded(data: bytes) -> npt.NDArray[np.uint8]:
    """uint8, (bytes,), writable: a copy of ``data`` that ends where the page begins."""
    whole = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + whole), mmap.PAGESIZE, _PROT_NONE) == 0
    found = memory[whole - len(data) : whole]
    found[:] = np.frombuffer(data, np.uint8)
    return found
