"""A device program (``loaderd.schema.device_program``) in PyTorch's operations, which ``torch.compile`` fuses.

Values are chosen as integers of the same bits, and become the field's dtype last: PyTorch has no ``where`` for some
dtypes, and no operation may touch the bits of a NaN.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from loaderd.schema import FieldSpec
from loaderd.schema.device_program import (
    Cast,
    Collect,
    DeviceProgram,
    ExpandBits,
    LookUp,
    LookUpCodes,
    OneHotOf,
    Permute,
    Put,
    Step,
    as_int64,
    inputs_of,
)
from loaderd_torch.dtypes import torch_dtype_of

Tensors = dict[str, torch.Tensor]
_logger = logging.getLogger("loaderd")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Operation = Callable[..., torch.Tensor]


class Unpacker:
    """Makes the fields ``names`` of packed ones, by ``program``, on ``device``."""

    def __init__(self, program: DeviceProgram, names: Collection[str], device: torch.device) -> None:
        self._steps = {
            name: [(inputs_of(step), _operation(step, device)) for step in program.steps[name]] for name in names
        }
        self._sources = {
            name: [(permute, torch.from_numpy(permute.sources).to(device)) for permute in permutes]
            for name, permutes in program.permutes.items()
            if name in self._steps
        }
        self.inputs = program.inputs(names)
        """The packed fields that it reads."""

    def __call__(self, packed: Mapping[str, torch.Tensor]) -> Tensors:
        """``packed``: (n, …) each; returns (n, …) each."""
        flat = {name: tensor if tensor.dim() == 2 else _flat(tensor) for name, tensor in packed.items()}
        some = next(iter(flat.values()))
        fields = {}
        for name, steps in self._steps.items():
            parts = [operation(*([flat[each] for each in inputs] or [some])) for inputs, operation in steps]
            fields[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            for permute, sources in self._sources.get(name, ()):
                number = flat[permute.feature][:, 0].long().clamp_(max=len(sources) - 1)  # one too large ends CUDA
                fields[name] = _permuted(fields[name], sources[number], permute)
        return fields


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def packed_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Of a packed field; where PyTorch lacks the dtype, whose values are only looked up then, of the bits."""
    try:
        return torch_dtype_of(dtype)
    except TypeError:
        return torch_dtype_of(np.dtype(f"i{dtype.itemsize}"))


class BlockReader:
    """Finds packed fields of these ``specs`` in blocks that lie on a device (``client.batch.Block``)."""

    def __init__(self, specs: Mapping[str, FieldSpec]) -> None:
        self._fields = {
            name: (spec.record_bytes, packed_dtype(spec.dtype), math.prod(spec.shape)) for name, spec in specs.items()
        }

    def __call__(self, block: torch.Tensor, offsets: Mapping[str, int], num_records: int) -> Tensors:
        """``block``: uint8, (bytes,); returns (n, values) each, views of it."""
        fields = {}
        for name, offset in offsets.items():
            record_bytes, dtype, num_values = self._fields[name]
            values = block.narrow(0, offset, num_records * record_bytes)
            fields[name] = (values if dtype == torch.uint8 else values.view(dtype)).view(num_records, num_values)
        return fields


def _operation(step: Step, device: torch.device) -> _Operation:
    if isinstance(step, ExpandBits):
        value = _as_integers(step.value).to(device)
        return partial(
            _expand_bits,
            byte=torch.from_numpy(step.byte).to(device),
            mask=torch.from_numpy(step.mask).to(device),
            value=value,
            zero=torch.zeros((), dtype=value.dtype, device=device),
            dtype=torch_dtype_of(step.value.dtype),
            shape=step.shape,
        )
    if isinstance(step, LookUp):
        return partial(
            _look_up,
            step=step,
            table=_as_integers(step.table).to(device),
            dtype=torch_dtype_of(step.table.dtype),
        )
    if isinstance(step, Collect):
        arrays = (step.byte, step.mask, step.nibble_byte, step.nibble_shift, step.table)
        tensors = [None if each is None else torch.from_numpy(each).to(device) for each in arrays]
        return partial(_collect, step=step, tensors=tensors)
    if isinstance(step, LookUpCodes):
        tensors = [torch.from_numpy(each).to(device) for each in (step.high, step.low, step.shift)]
        table, dtype = _as_integers(step.table).to(device), torch_dtype_of(step.table.dtype)
        return partial(_look_up_codes, step=step, tensors=tensors, table=table, dtype=dtype)
    if isinstance(step, Put):
        return partial(_put, step=step, values_of=_operation(step.values, device), dtype=torch_dtype_of(step.dtype))
    if isinstance(step, OneHotOf):
        one, dtype = _as_integers(step.one[None]).to(device), torch_dtype_of(step.one.dtype)
        return partial(_one_hot, step=step, one=one, dtype=dtype)
    if isinstance(step, Cast):
        return partial(_cast, step=step, dtype=torch_dtype_of(step.dtype))
    return partial(
        _fill,
        value=_as_integers(step.value[None]).to(device),
        dtype=torch_dtype_of(step.value.dtype),
        shape=step.shape,
    )


def _as_integers(values: Any) -> torch.Tensor:
    """The bits of values: int8 to int64."""
    return torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"))


def _expand_bits(
    stored: torch.Tensor,
    byte: torch.Tensor,
    mask: torch.Tensor,
    value: torch.Tensor,
    zero: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    kernel = None if torch.compiler.is_compiling() or not stored.is_cuda else _bit_kernel(stored.device)
    if kernel is not None:
        integers = kernel(stored, byte, mask, value)
    else:
        integers = torch.where((stored.index_select(1, byte) & mask) != 0, value, zero)
    return integers.view(dtype).reshape(-1, *shape)


@functools.cache
def _bit_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """``bit_kernel.expand_bits``, where Triton can compile it: it needs a C compiler, and knows not every GPU."""
    try:
        from loaderd_torch.bit_kernel import expand_bits

        one = torch.zeros(1, dtype=torch.uint8, device=device)
        expand_bits(one[:, None], one.long(), one, one)
    except ImportError:
        return None
    except Exception as error:
        _logger.warning("bits are unpacked by PyTorch's own operations, as Triton fails: %.300s", error)
        return None
    return expand_bits


def _look_up(stored: torch.Tensor, step: LookUp, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = stored[:, step.first : step.first + step.count].contiguous()
    is_byte = len(table) == 256
    index = values.view(torch.uint8 if is_byte else torch.int16).to(torch.int64)
    if not is_byte:
        index = index & 0xFFFF
    return _repeated(table[index].view(dtype), step.repeat).reshape(-1, *step.shape)


def _collect(bits: torch.Tensor, *others: torch.Tensor, step: Collect, tensors: list[Any]) -> torch.Tensor:
    byte, mask, nibble_byte, nibble_shift, table = tensors
    is_set = (bits.index_select(1, byte) & mask) != 0
    n, num_bits = is_set.shape
    position = torch.arange(num_bits, device=bits.device).expand(n, num_bits)
    if nibble_byte is not None:
        code = (others[0].view(torch.uint8).index_select(1, nibble_byte) >> nibble_shift & 15).to(torch.int64)
        rank = (is_set.cumsum(1) - 1).clamp(0, code.shape[1] - 1)
        position = position + code.gather(1, rank) * step.squares
    at = position
    if step.has_bucket:
        at = position + others[-1].view(torch.uint8).to(torch.int64) * table.shape[1]
    elif step.bucket_code >= 0:
        square = position - step.bucket_code * step.squares
        is_king = is_set & (square >= 0) & (square < step.squares)
        at = position + square.gather(1, is_king.to(torch.int32).argmax(1, keepdim=True)) * table.shape[1]
    index = table.reshape(-1)[at]
    ends = (is_set & (index >= 0)).cumsum(1)
    if step.counts:
        return ends[:, -1].to(table.dtype).contiguous()
    ranks = torch.arange(1, step.k + 1, device=bits.device).expand(n, step.k)
    found = torch.searchsorted(ends, ranks.contiguous())
    return torch.where(
        found < num_bits, index.gather(1, found.clamp(max=num_bits - 1)), torch.full_like(index[:, :1], -1)
    )


def _look_up_codes(
    stored: torch.Tensor, step: LookUpCodes, tensors: list[torch.Tensor], table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    high, low, shift = tensors
    words = stored.index_select(1, high).to(torch.int32) << 8 | stored.index_select(1, low)
    return table[(words >> shift & step.mask).to(torch.int64)].view(dtype).reshape(-1, *step.shape)


def _put(
    indices: torch.Tensor, stored: torch.Tensor, step: Put, values_of: _Operation, dtype: torch.dtype
) -> torch.Tensor:
    """Where several values have one index, and where it is -1, all but the last go to a place behind the others."""
    n, num_values = indices.shape
    values = values_of(stored).reshape(n, num_values).contiguous().view(_INTEGERS[step.dtype.itemsize])
    index = _in_64_bits(indices)
    is_later = torch.ones(num_values, num_values, dtype=torch.bool, device=index.device).triu(1)
    is_last = ~((index[:, :, None] == index[:, None, :]) & is_later).any(2)
    place = torch.where(is_last & (index >= 0), index, torch.full_like(index, step.size))
    made = values.new_zeros(n, step.size + 1).scatter(1, place, values)
    return made[:, : step.size].contiguous().view(dtype).reshape(-1, *step.shape)


def _one_hot(stored: torch.Tensor, step: OneHotOf, one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_class = _in_64_bits(stored)[:, :, None] == torch.arange(step.classes, device=stored.device)
    return torch.where(is_class, one, torch.zeros_like(one)).view(dtype).reshape(-1, *step.shape)


def _in_64_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)


def _cast(stored: torch.Tensor, step: Cast, dtype: torch.dtype) -> torch.Tensor:
    values = stored[:, step.first : step.first + step.count]
    is_plain = step.scale is None and step.offset is None
    if is_plain and step.repeat == 1 and values.element_size() == dtype.itemsize:
        # Another field may be the same values, and whoever keeps one shall not keep the block.
        bits = values.view(torch.uint8) if values.dtype == torch.bool else values  # of which a copy would be 0 and 1
        values = bits.clone(memory_format=torch.contiguous_format).view(values.dtype)
    if values.dtype != dtype or not is_plain:
        if not is_plain or not dtype.is_floating_point:
            values = _in_64_bits(values)
        if step.scale is not None:
            values = values * as_int64(step.scale)
        if step.offset is not None:
            values = values + as_int64(step.offset)
        values = values.view(dtype) if dtype == torch.uint64 else values.to(dtype)
    return _repeated(values, step.repeat).reshape(-1, *step.shape)


def _permuted(values: torch.Tensor, places: torch.Tensor, step: Permute) -> torch.Tensor:
    """``places``: int64, (n, places): from where the values of each one come."""
    n, num_places = places.shape
    outer = math.prod(values.shape[1:]) // (num_places * step.inner)
    integers = values.view(_INTEGERS[values.element_size()]).reshape(n, outer, num_places, step.inner)
    index = places[:, None, :, None].expand(integers.shape)
    if (step.sources < 0).any():
        integers = integers.gather(2, index.clamp(min=0)).masked_fill_(index < 0, 0)
    else:
        integers = integers.gather(2, index)
    return integers.view(values.dtype).reshape(values.shape)


def _repeated(values: torch.Tensor, repeat: int) -> torch.Tensor:
    return values if repeat == 1 else values[:, :, None].expand(-1, -1, repeat).contiguous()


def _fill(some: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return value.view(dtype).expand(len(some), *shape)
