"""Which dtype of PyTorch's is one of numpy's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

# For each dtype of ml_dtypes that PyTorch has: the integers by which numpy hands it over, and PyTorch's dtype.
_BY_BITS = {
    np.dtype(getattr(ml_dtypes, name)): (integers, getattr(torch, name))
    for name, integers in [
        ("bfloat16", np.uint16),
        *((name, np.uint8) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")),
    ]
}


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor in the memory of ``array``. Raises TypeError where PyTorch lacks its dtype."""
    if array.dtype in _BY_BITS:
        integers, dtype = _BY_BITS[array.dtype]
        return torch.from_numpy(array.view(integers)).view(dtype)
    return torch.from_numpy(array)


def torch_dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """Raises TypeError where PyTorch has none."""
    return _BY_BITS[dtype][1] if dtype in _BY_BITS else torch.from_numpy(np.empty(0, dtype)).dtype
