"""A device program in numpy: what every other library's result is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import loaderd
from loaderd import Array, Raw, Schema, schemas
from loaderd.schema.device_program import (
    Cast,
    Collect,
    Constant,
    DeviceProgram,
    ExpandBits,
    LookUpCodes,
    OneHotOf,
    Put,
    Step,
)
from loaderd.schema.fields import Permuted

AnyArray = npt.NDArray[Any]
READY_MADE = [
    schemas.chess_eval(value_a=0.7),
    *(schemas.chess_eval(dtype=dtype) for dtype in ("bfloat16", "float16", "int8")),
    schemas.lc0(),
    schemas.lc0("bfloat16", symmetries=(0, 1)),
    schemas.lc0(symmetries=(0, 1), targets="all", input_format=2),
    schemas.lc0("float16", targets="st", input_format=133),
    schemas.katago(),
    schemas.katago(9, 80, symmetries=range(8)),
    schemas.katago(5, symmetries=range(8), mask_history=0.4, q_values=True, metadata=True),
    schemas.katago(5, mask_history=0.4),
    schemas.minigo(),
    schemas.minigo(9, 5, symmetries=(0, 3, 6)),
    schemas.mnist(),
    Schema(
        {"number": Raw("uint8"), "values": Raw("int16", (2, 3, 4))},
        {"x": Permuted(Array("values", "float32"), "number", [[0, 1, 2], [2, -1, 1], [1, 1, 0]], 4, "float32")},
    ),
]
"""Of each kind, with the options that change what is stored or made; and one of any numbers of its three tables."""


def run(program: DeviceProgram, packed: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """The fields of packed ones, each (n, …)."""
    n = len(next(iter(packed.values())))
    flat = {name: values.reshape(n, -1) for name, values in packed.items()}
    with np.errstate(all="ignore"):
        return {name: field_of(name, program, n, flat) for name in program.steps}


def field_of(name: str, program: DeviceProgram, n: int, flat: Mapping[str, AnyArray]) -> AnyArray:
    parts = [values_of(step, n, flat).reshape(n, *step.shape) for step in program.steps[name]]
    joined = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    for permute in program.permutes.get(name, ()):
        places = permute.sources[np.minimum(flat[permute.feature][:, 0], len(permute.sources) - 1)][:, None, :, None]
        grouped = joined.reshape(n, -1, places.shape[2], permute.inner)
        taken = np.take_along_axis(grouped, places, axis=2)
        taken[np.broadcast_to(places < 0, taken.shape)] = 0
        joined = taken.reshape(joined.shape)
    return joined


def values_of(step: Step, n: int, flat: Mapping[str, AnyArray]) -> AnyArray:
    if isinstance(step, Constant):
        return np.full((n, *step.shape), step.value)
    if isinstance(step, ExpandBits):
        is_set = (flat[step.feature][:, step.byte] & step.mask) != 0
        return np.where(is_set, step.value, np.zeros((), step.value.dtype))
    if isinstance(step, Collect):
        return collected(step, *(flat[feature].view(np.uint8) for feature in step.features))
    if isinstance(step, LookUpCodes):
        stored = flat[step.feature].astype(int)
        return step.table[(stored[:, step.high] << 8 | stored[:, step.low]) >> step.shift & step.mask]
    if isinstance(step, OneHotOf):
        is_class = flat[step.feature][..., None] == np.arange(step.classes)
        return np.where(is_class, step.one, np.zeros((), step.one.dtype))
    if isinstance(step, Put):
        found = np.zeros((n, step.size + 1), step.dtype)  # the last place is -1, too
        for index, values in zip(flat[step.features[0]].T, values_of(step.values, n, flat).T, strict=True):
            found[np.arange(n), index.astype(int)] = values
        return found[:, :-1]
    stored = np.ascontiguousarray(flat[step.feature][:, step.first : step.first + step.count])
    if not isinstance(step, Cast):
        return np.repeat(step.table[stored.view(f"u{stored.dtype.itemsize}")], step.repeat, axis=1)
    values = stored.astype(step.dtype)
    values = values if step.scale is None else values * step.dtype.type(step.scale)
    values = values if step.offset is None else values + step.dtype.type(step.offset)
    return np.repeat(values, step.repeat, axis=1)


def unpacked(loader: loaderd.Loader, batches: Iterable[loaderd.Batch]) -> Iterator[loaderd.Batch]:
    """Packed batches of ``loader``, unpacked."""
    program = loader._unpacked_schema.device_program()
    return (loaderd.Batch(run(program, batch)) for batch in batches)


def collected(step: Collect, bits: AnyArray, *others: AnyArray) -> AnyArray:
    is_set = (bits[:, step.byte] & step.mask) != 0
    position = np.broadcast_to(np.arange(len(step.byte)), is_set.shape)
    if step.nibble_byte is not None:
        code = others[0][:, step.nibble_byte] >> step.nibble_shift & 15
        rank = np.clip(np.cumsum(is_set, axis=1) - 1, 0, code.shape[1] - 1)
        position = position + np.take_along_axis(code, rank, axis=1).astype(int) * step.squares
    bucket = others[-1].astype(int) if step.has_bucket else np.zeros((len(bits), 1), int)
    if step.bucket_code >= 0:
        square = position - step.bucket_code * step.squares
        king = is_set & (square >= 0) & (square < step.squares)
        bucket = np.take_along_axis(square, king.argmax(axis=1)[:, None], axis=1)
    index = step.table.reshape(-1)[bucket * step.table.shape[1] + position]
    is_kept = is_set & (index >= 0)
    if step.counts:
        return is_kept.sum(axis=1).astype(step.table.dtype)
    first = np.argsort(~is_kept, axis=1, kind="stable")[:, : step.k]
    found = np.full((len(bits), step.k), -1, step.table.dtype)
    found[:, : first.shape[1]] = np.where(
        np.take_along_axis(is_kept, first, axis=1), np.take_along_axis(index, first, axis=1), -1
    )
    return found
