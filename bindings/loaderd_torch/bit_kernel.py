"""The ``ExpandBits`` of a device program as one Triton kernel, where PyTorch's operations would be four.

Each program reads what it needs of ``byte``, ``mask`` and ``value`` once, for some rows, and writes one value a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _VALUES = 16, 1024  # of one program


# Without annotations: Triton would look for what they name.
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    stored, byte, mask, value, out, num_rows, num_bytes, num_values, rows: tl.constexpr, values: tl.constexpr
):
    column = tl.program_id(1) * values + tl.arange(0, values)
    in_columns = column < num_values
    offset = tl.load(byte + column, mask=in_columns, other=0)
    bit = tl.load(mask + column, mask=in_columns, other=0)
    if_set = tl.load(value + column, mask=in_columns, other=0)
    first = tl.program_id(0).to(tl.int64) * rows
    for number in range(rows):
        row = first + number
        in_bounds = in_columns & (row < num_rows)
        packed = tl.load(stored + row * num_bytes + offset, mask=in_bounds, other=0)
        tl.store(out + row * num_values + column, tl.where((packed & bit) != 0, if_set, 0), mask=in_bounds)


def expand_bits(stored: torch.Tensor, byte: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(n, values) integers of ``value``'s dtype: see ``device_program.ExpandBits``. ``stored``: uint8, (n, bytes)."""
    stored = stored.contiguous()
    (num_rows, num_bytes), num_values = stored.shape, len(value)
    out = torch.empty((num_rows, num_values), dtype=value.dtype, device=value.device)
    if out.numel():
        grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_values, _VALUES))
        with torch.cuda.device(value.device):  # Triton takes the current one
            _kernel[grid](stored, byte, mask, value, out, num_rows, num_bytes, num_values, _ROWS, _VALUES)
    return out
