"""A device program (``loaderd.schema.device_program``) in JAX's operations: one compiled function.

Values are chosen as unsigned integers of the same bits, and become the field's dtype last, so that no compiler takes
a subnormal number for 0, or changes a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from loaderd.schema.device_program import (
    Cast,
    Collect,
    Constant,
    DeviceProgram,
    ExpandBits,
    LookUp,
    LookUpCodes,
    OneHotOf,
    Permute,
    Put,
    Step,
    inputs_of,
)

Arrays = dict[str, jax.Array]
PlacedField = tuple[str, int, tuple[int, np.dtype[Any], tuple[int, ...]]]
"""The name of a packed field; in which block it is; where it begins there, in bytes; its dtype and shape, (n, …)."""


class Unpacker:
    """Makes the fields ``names`` of packed ones, by ``program``."""

    def __init__(self, program: DeviceProgram, names: Collection[str]) -> None:
        self._steps = {name: (program.steps[name], program.permutes.get(name, ())) for name in names}
        self.inputs = program.inputs(names)
        """The packed fields that it reads."""
        self._run = jax.jit(self.unpack)
        self._run_blocks = jax.jit(self._unpack_blocks, static_argnums=(1,))

    def of_blocks(self, blocks: list[jax.Array], fields: tuple[PlacedField, ...]) -> Arrays:
        """``blocks``: uint8, (bytes,) each, in which the packed ``fields`` lie; returns (n, …) each."""
        return self._run_blocks(blocks, fields)  # type: ignore[no-any-return]

    def _unpack_blocks(self, blocks: list[jax.Array], fields: tuple[PlacedField, ...]) -> Arrays:
        return self.unpack({name: _in_block(blocks[number], *place) for name, number, place in fields})

    def __call__(self, packed: Mapping[str, jax.Array]) -> Arrays:
        """``packed``: (n, …) each; returns (n, …) each."""
        return self._run(packed)  # type: ignore[no-any-return]

    def unpack(self, packed: Mapping[str, jax.Array]) -> Arrays:
        """The same as a part of a function that is compiled as a whole."""
        flat = {name: array.reshape(len(array), -1) for name, array in packed.items()}
        n = len(next(iter(flat.values())))
        fields = {}
        for name, (steps, permutes) in self._steps.items():
            parts = [
                jnp.broadcast_to(_constant(step.value), (n, *step.shape))
                if isinstance(step, Constant)
                else _made(step, *(flat[feature] for feature in inputs_of(step))).reshape(n, *step.shape)
                for step in steps
            ]
            fields[name] = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
            for permute in permutes:
                fields[name] = _permuted(fields[name], permute, flat[permute.feature][:, 0])
        return fields


def can_be_in_block(dtype: np.dtype[Any]) -> bool:
    """Whether JAX takes bytes for values of ``dtype``."""
    return dtype.kind not in "bcSU"


def _in_block(block: jax.Array, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> jax.Array:
    """(n, values)"""
    num_values = math.prod(shape)
    values = jax.lax.slice(block, (offset,), (offset + num_values * dtype.itemsize,))
    if dtype.itemsize > 1:
        values = values.reshape(num_values, dtype.itemsize)
    return jax.lax.bitcast_convert_type(values, dtype).reshape(shape)


def _made(step: Step, stored: jax.Array, *others: jax.Array) -> jax.Array:
    """(n, values)"""
    if isinstance(step, Collect):
        return _collected(step, stored, *(jax.lax.bitcast_convert_type(each, jnp.uint8) for each in others))
    if isinstance(step, LookUpCodes):
        words = stored[:, step.high].astype(jnp.int32) << 8 | stored[:, step.low]
        return _as(jnp.asarray(_as_integers(step.table))[words >> step.shift & step.mask], step.table.dtype)
    if isinstance(step, Put):
        return _put(step, _signed(stored), _made(step.values, *others).reshape(stored.shape))
    if isinstance(step, OneHotOf):
        is_class = _signed(stored)[:, :, None] == np.arange(step.classes)
        one = _as_integers(step.one)
        return _as(jnp.where(is_class, one, np.zeros_like(one)), step.one.dtype)
    if isinstance(step, ExpandBits):
        is_set = (stored[:, step.byte] & step.mask) != 0
        integers = _as_integers(step.value)
        return _as(jnp.where(is_set, integers, np.zeros((), integers.dtype)), step.value.dtype)
    assert isinstance(step, (LookUp, Cast))
    values = stored[:, step.first : step.first + step.count]
    if isinstance(step, LookUp):
        index = jax.lax.bitcast_convert_type(values, jnp.dtype(f"u{values.dtype.itemsize}"))
        values = _as(jnp.asarray(_as_integers(step.table))[index], step.table.dtype)
    elif values.dtype != step.dtype or step.scale is not None or step.offset is not None:
        values = values.astype(step.dtype)
        if step.scale is not None:
            values = values * step.dtype.type(step.scale)
        if step.offset is not None:
            values = values + step.dtype.type(step.offset)
    return jnp.repeat(values, step.repeat, axis=1) if step.repeat != 1 else values


def _collected(step: Collect, bits: jax.Array, *others: jax.Array) -> jax.Array:
    is_set = (bits[:, step.byte] & step.mask) != 0
    position = jnp.arange(len(step.byte))[None]
    if step.nibble_byte is not None:
        code = (others[0][:, step.nibble_byte] >> step.nibble_shift & 15).astype(jnp.int32)
        rank = jnp.clip(jnp.cumsum(is_set, axis=1, dtype=jnp.int32) - 1, 0, code.shape[1] - 1)
        position = position + jnp.take_along_axis(code, rank, axis=1) * step.squares
    at = position
    if step.has_bucket:
        at = position + others[-1].astype(jnp.int32) * step.table.shape[1]
    elif step.bucket_code >= 0:
        square = position - step.bucket_code * step.squares
        is_king = is_set & (square >= 0) & (square < step.squares)
        at = position + (square * is_king).sum(axis=1, keepdims=True, where=_firsts(is_king)) * step.table.shape[1]
    index = jnp.asarray(step.table.reshape(-1))[jnp.broadcast_to(at, is_set.shape)]
    ends = jnp.cumsum(is_set & (index >= 0), axis=1, dtype=jnp.int32)
    if step.counts:
        return ends[:, -1].astype(step.table.dtype)
    # As many bits end before the r-th index as have fewer than r: compared all at once, in one loop.
    found = (ends[:, None, :] < jnp.arange(1, step.k + 1)[:, None]).sum(axis=2, dtype=jnp.int32)
    chosen = jnp.take_along_axis(index, jnp.minimum(found, len(step.byte) - 1), axis=1)
    return jnp.where(found < len(step.byte), chosen, -1)


def _put(step: Put, index: jax.Array, values: jax.Array) -> jax.Array:
    """Where several values have one index, and where it is -1, all but the last go to a place that is not kept."""
    integers = jax.lax.bitcast_convert_type(values, jnp.dtype(f"u{step.dtype.itemsize}"))
    is_same = index[:, :, None] == index[:, None, :]
    is_last = ~(is_same & np.triu(np.ones(is_same.shape[1:], bool), 1)).any(axis=2)
    place = jnp.where(is_last & (index >= 0), index, step.size)
    made = jnp.zeros((len(index), step.size), integers.dtype)
    return _as(made.at[jnp.arange(len(index))[:, None], place].set(integers, mode="drop"), step.dtype)


def _signed(values: jax.Array) -> jax.Array:
    """In 32 bits, or in 64 where it has these. What is too large is below 0 then."""
    return values.astype(jnp.int64 if values.dtype.itemsize == 8 else jnp.int32)


def _firsts(flags: jax.Array) -> jax.Array:
    """Of each row, the first flag alone."""
    return flags & (jnp.cumsum(flags, axis=1, dtype=jnp.int32) == 1)


def _as_integers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.view(f"u{values.dtype.itemsize}")


def _as(integers: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    if dtype == np.bool_:
        return integers != 0
    return jax.lax.bitcast_convert_type(integers, dtype)


def _permuted(values: jax.Array, step: Permute, numbers: jax.Array) -> jax.Array:
    """``numbers``: uint8, (n,)."""
    places = jnp.asarray(step.sources.astype(np.int32)).at[numbers].get(mode="clip")
    n, num_places = places.shape
    outer = math.prod(step.shape) // (num_places * step.inner)
    grouped = values.reshape(n, outer, num_places, step.inner)
    taken = jnp.take_along_axis(grouped, places[:, None, :, None], axis=2, mode="clip")
    if (step.sources < 0).any():
        taken = jnp.where(places[:, None, :, None] < 0, jnp.zeros((), taken.dtype), taken)
    return taken.reshape(values.shape)


def _constant(value: npt.NDArray[Any]) -> jax.Array:
    return _as(jnp.asarray(_as_integers(value)), value.dtype)
