"""What is left to do where batches travel packed: short steps in plain values, for any library of arrays.

::

    rows ──packed_schema(s, for_device=True)──► batch: features as stored, and fields that the workers finish
                                                  │ one copy
                                                  ▼
    the fields of s ◄──────device_program(s)──── device

A step takes a feature, ``(n, values)``, or several, and makes a field of it, or a part of one:

==============  ====================================================================================================
``ExpandBits``  byte ``byte[i]`` of the feature, and ``mask[i]``: not 0 gives ``value[i]``, 0 gives 0
``LookUp``      a value of one or two bytes, as an unsigned integer, is an index into ``table``, which numpy made
``Cast``        a value as it is, or cast: integers to integers, which wrap, or exactly rounded to float32 or float64
``Collect``     the indices of set bits, or of pieces on them, from a table
``LookUpCodes``  codes of a few bits are indices into ``table``
``Put``         values at their indices, 0 elsewhere
``OneHotOf``    1 at the place that an integer names, 0 elsewhere
``Constant``    the same everywhere
==============  ====================================================================================================

At last, ``Permute`` may take the values of a field from other places, by a table that was drawn for each record, or
make them 0.

No step computes in floats: a library may round ``x * scale + offset`` once, where numpy rounds twice, and take
subnormal numbers for 0. So all make the bits that the workers make. What would need such arithmetic, or a check of
its values, the workers finish, and so they do with ``Derived``. Codes, indices and integers that there may not be,
the workers look at (``Schema.checked_fields``), and send them as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema.codes import Codes, PrefixCodes
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.exact import ArrayValues, ExactCast, SpreadValues, is_cast
from loaderd.schema.features import Feature, PackedBits, Shape
from loaderd.schema.fields import (
    Array,
    Bits,
    Derived,
    Field,
    Fill,
    Packed,
    Permuted,
    Planes,
    Single,
    Spread,
    parts_of,
    permuted_in,
)
from loaderd.schema.representable import holds_numbers, in_dtype, integer_limits
from loaderd.schema.sparse import Sparse

AnyArray = npt.NDArray[Any]
_MOST_COLLECTED_BITS = 2048  # a device takes several bytes for each
_MOST_PUT_BYTES = 1024  # a device compares each index of a record with all of them
_PLACE_BYTES = np.dtype(np.intp).itemsize
_MAX_TABLE_ITEMSIZE = 2  # bytes of a stored value; the table has an entry for each possible one


@dataclass(frozen=True, eq=False)
class ExpandBits:
    """``byte``: intp, ``mask``: uint8, ``value``: the field's dtype; (values,) each, as many as ``shape`` has."""

    feature: str
    byte: npt.NDArray[np.intp]
    mask: npt.NDArray[np.uint8]
    value: AnyArray
    shape: Shape

    def __str__(self) -> str:
        values = "…".join(map(str, (self.byte.min(), self.byte.max()))) if self.byte.size else "none"
        return (
            f"expand {self.byte.size} bits in bytes {values} of {self.feature!r} -> {self.value.dtype} {self.shape}"
        )


@dataclass(frozen=True, eq=False)
class LookUp:
    """``table``: the field's dtype, (256,) or (65536,), for values ``first`` to ``first + count - 1``.

    Each result is repeated ``repeat`` times.
    """

    feature: str
    first: int
    count: int
    table: AnyArray
    repeat: int
    shape: Shape

    def __str__(self) -> str:
        return (
            f"look up {_taken(self)} in a table of {len(self.table)}{_times(self)} -> {self.table.dtype} {self.shape}"
        )


@dataclass(frozen=True, eq=False)
class Cast:
    """Values ``first`` to ``first + count - 1`` as ``dtype``, times ``scale``, plus ``offset`` if it is of integers.

    Each result is repeated ``repeat`` times. ``scale`` and ``offset`` are of ``dtype``.
    """

    feature: str
    first: int
    count: int
    dtype: np.dtype[Any]
    scale: int | None
    offset: int | None
    repeat: int
    shape: Shape

    def __str__(self) -> str:
        scaled = "" if self.scale is None else f" times {self.scale}"
        scaled += "" if self.offset is None else f" plus {self.offset}"
        return f"take {_taken(self)}{scaled}{_times(self)} -> {self.dtype} {self.shape}"


def _taken(step: LookUp | Cast) -> str:
    last = step.first + step.count - 1
    values = f"value {last}" if step.count == 1 else f"values {step.first}…{last}"
    return f"{values} of {step.feature!r}"


def _times(step: LookUp | Cast) -> str:
    return "" if step.repeat == 1 else f", {step.repeat} times each"


@dataclass(frozen=True, eq=False)
class Constant:
    """``value``: of the field's dtype, ()."""

    value: AnyArray
    shape: Shape

    def __str__(self) -> str:
        return f"fill with {self.value} -> {self.value.dtype} {self.shape}"


@dataclass(frozen=True, eq=False)
class Collect:
    """The first ``k`` indices, and -1 behind them; or, with ``counts``, how many there are.

    ::

        square[b]  the number of bit b, which is at byte[b], mask[b] of the first of ``features``
        position   square; with ``nibble_byte``, and for the r-th set bit, also its code from the second feature:
                   (nibble_byte[r] >> nibble_shift[r] & 15) * squares + square
        bucket     0; or the value of the last feature; or, with a ``bucket_code`` of 0 or more, of the first position
                   from bucket_code * squares on, less than squares behind it, how far behind it is
        index      table[bucket, position], left out if it is below 0

    ``table``: the field's dtype, (buckets, positions).
    """

    features: tuple[str, ...]
    byte: npt.NDArray[np.intp]
    mask: npt.NDArray[np.uint8]
    nibble_byte: npt.NDArray[np.intp] | None
    nibble_shift: npt.NDArray[np.uint8] | None
    has_bucket: bool
    bucket_code: int
    table: AnyArray
    squares: int
    k: int
    counts: bool
    shape: Shape

    def __str__(self) -> str:
        what = "count what is kept" if self.counts else f"collect the first {self.k}"
        return (
            f"{what} of {len(self.byte)} bits of {self.features[0]!r} by a table of {self.table.shape} -> "
            f"{self.table.dtype} {self.shape}"
        )


@dataclass(frozen=True, eq=False)
class Permute:
    """Of values (n, outer, places, inner), place i is what was place ``sources[number, i]``; -1: it is 0.

    ``sources``: intp, (tables, places). ``feature`` has the number of each record's table, uint8, (n,). One that is
    too large, which no worker sends, counts as the last one.
    """

    feature: str
    sources: npt.NDArray[np.intp]
    inner: int
    shape: Shape

    def __str__(self) -> str:
        return f"permute all of them by the table of {len(self.sources)} that {self.feature!r} names -> {self.shape}"


@dataclass(frozen=True, eq=False)
class LookUpCodes:
    """``table``, (codes, values of each), of the codes (bytes[high[i]] << 8 | bytes[low[i]]) >> shift[i] & mask."""

    feature: str
    high: npt.NDArray[np.intp]
    low: npt.NDArray[np.intp]
    shift: npt.NDArray[np.int32]
    mask: int
    table: AnyArray
    shape: Shape

    def __str__(self) -> str:
        return (
            f"look up {len(self.shift)} codes in {self.feature!r} in a table of {len(self.table)} -> "
            f"{self.table.dtype} {self.shape}"
        )


@dataclass(frozen=True, eq=False)
class Put:
    """What ``values`` makes, (n, values) of ``dtype``, at the places that the first of ``features`` names.

    Of values with one index, the last one counts; those with an index of -1 are left out. ``size``: how many places
    there are.
    """

    features: tuple[str, ...]
    values: LookUp | Cast
    dtype: np.dtype[Any]
    size: int
    shape: Shape

    def __str__(self) -> str:
        return f"put values at {self.features[0]!r} -> {self.dtype} {self.shape}: {self.values}"


@dataclass(frozen=True, eq=False)
class OneHotOf:
    """``one``, of the field's dtype, (), where a value of the feature is the number of a class; else 0."""

    feature: str
    classes: int
    one: AnyArray
    shape: Shape

    def __str__(self) -> str:
        return f"compare {self.feature!r} with {self.classes} classes -> {self.one.dtype} {self.shape}"


Step = ExpandBits | LookUp | Cast | Collect | LookUpCodes | Put | OneHotOf | Constant


def inputs_of(step: Step | Permute) -> tuple[str, ...]:
    """The packed fields that a step takes, in the order in which it names them."""
    if isinstance(step, Constant):
        return ()
    return step.features if isinstance(step, (Collect, Put)) else (step.feature,)


@dataclass(frozen=True, eq=False)
class DeviceProgram:
    """``steps``: for each field by name, in the schema's order, the parts that are joined along their first axis.

    ``permutes``: what comes behind them, for the fields that have it.
    """

    steps: Mapping[str, tuple[Step, ...]]
    permutes: Mapping[str, tuple[Permute, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {step}" for name in self.steps for step in self._all_of(name))

    def _all_of(self, name: str) -> tuple[Step | Permute, ...]:
        return (*self.steps[name], *self.permutes.get(name, ()))

    def inputs(self, names: Collection[str]) -> tuple[str, ...]:
        """The packed fields of which the fields ``names`` are made."""
        steps = [step for name in names for step in self._all_of(name)]
        return tuple(dict.fromkeys(feature for step in steps for feature in inputs_of(step)))


def as_int64(number: int) -> int:
    """A scale or an offset in 64 bits with a sign, in which products and sums have the lowest bits of all dtypes'."""
    return (number + 2**63) % 2**64 - 2**63


def steps_of(name: str, definition: Field, features: Mapping[str, Feature]) -> tuple[Step, ...] | None:
    """The steps that make field ``name`` of stored ``features``; None: the workers finish it."""
    steps = [_step(name, part, features) for part in parts_of(definition)]
    for permuted in permuted_in(definition):
        steps = [None if step is None else _as_dtype(step, permuted.dtype, features) for step in steps]
    known = tuple(step for step in steps if step is not None)
    return known if len(known) == len(steps) else None


def table_bytes(name: str, definition: Field, features: Mapping[str, Feature]) -> int:
    """At most how many bytes the arrays take in the steps of a field, beside those that its definition has."""
    itemsize = definition.spec(name, features).dtype.itemsize
    return sum(_table_bytes(name, part, features, itemsize) for part in parts_of(definition))


def _table_bytes(name: str, part: Single, features: Mapping[str, Feature], itemsize: int) -> int:
    if isinstance(part, (Fill, Derived, Packed, PrefixCodes, OneHot)):
        return 0
    if isinstance(part, Sparse):
        return _MOST_COLLECTED_BITS * (_PLACE_BYTES + 1 + itemsize)
    if isinstance(part, Codes):
        return part.num_places * 3 * _PLACE_BYTES + (int(part.values.size) << part.width) * itemsize
    feature = features[part.values if isinstance(part, Scatter) else part.feature]
    if isinstance(feature, PackedBits):
        return math.prod(part.spec(name, features).shape) * (_PLACE_BYTES + 1 + itemsize)
    stored = feature.row_dtype.base.itemsize
    return itemsize << 8 * stored if stored <= _MAX_TABLE_ITEMSIZE else 0


def permutes_of(name: str, definition: Field, features: Mapping[str, Feature]) -> tuple[Permute, ...]:
    """What comes behind the steps of a field."""
    shape = definition.spec(name, features).shape
    return tuple(
        Permute(each.number, np.asarray(each.sources, np.intp), each.inner, shape) for each in permuted_in(definition)
    )


def _step(name: str, part: Field, features: Mapping[str, Feature]) -> Step | None:
    assert not isinstance(part, (Planes, Permuted))
    if isinstance(part, Derived):
        return None
    spec = part.spec(name, features)
    if isinstance(part, Fill):
        return Constant(in_dtype(part.value, part.dtype), spec.shape)
    if isinstance(part, PrefixCodes) or (isinstance(part, Sparse) and isinstance(part.feature, PrefixCodes)):
        return None  # each code says where the next one begins
    if isinstance(part, Sparse):
        return _collect(part, features, spec.shape)
    if isinstance(part, Scatter):
        return _put(part, features)
    feature = features[part.feature]
    if isinstance(part, Bits):
        return _bits(part)
    if isinstance(part, Codes):
        return _look_up_codes(part, feature, spec.shape)
    stored = feature.row_dtype.base.newbyteorder("=")
    if isinstance(part, OneHot):
        return OneHotOf(part.feature, part.classes, in_dtype(1, part.dtype), spec.shape)
    if isinstance(part, Spread):
        return _spread(part, feature, stored, spec.shape)
    if isinstance(part, Packed):
        return Cast(part.feature, 0, feature.num_bytes, stored, None, None, 1, spec.shape)
    return _array(part, stored, spec.dtype, spec.shape)


def _bits(part: Bits) -> ExpandBits:
    place = part.sources
    return ExpandBits(
        part.feature,
        np.maximum(place, 0) // 8,
        np.where(place < 0, np.uint8(0), _mask(place % 8, part.bit_order)),
        np.resize(part.channel_scale, part.num_bits),
        part.shape,
    )


def _collect(part: Sparse, features: Mapping[str, Feature], shape: Shape) -> Collect | None:
    assert isinstance(part.feature, str)
    feature = features[part.feature]
    assert isinstance(feature, PackedBits)
    if part.num_bits(feature) > _MOST_COLLECTED_BITS:
        return None
    place = part.start + np.arange(part.num_bits(feature))
    table, named = part.indices_of(feature.num_bits), (part.feature, part.codes, part.bucket)
    rank = np.arange(min(len(place), part.num_codes(features))) if part.codes is not None else None
    first = 0 if part.bit_order == "little" else 1
    return Collect(
        tuple(each for each in named if isinstance(each, str)),
        place // 8,
        _mask(place % 8, part.bit_order),
        None if rank is None else rank // 2,
        None if rank is None else (4 * (rank % 2 ^ first)).astype(np.uint8),
        isinstance(part.bucket, str),
        part.bucket if isinstance(part.bucket, int) else -1,
        table.reshape(len(table), -1).astype(part.dtype),
        table.shape[2],
        part.k,
        part.count,
        shape,
    )


def _look_up_codes(part: Codes, feature: Feature, shape: Shape) -> LookUpCodes:
    place = part.start + part.width * np.arange(part.num_places)
    high, low, shift, mask = part.words_of(place, feature.num_bytes)
    table = part.table.reshape(len(part.values), -1)
    whole = np.zeros((mask + 1, table.shape[1]), table.dtype)
    whole[: len(table)] = table
    return LookUpCodes(part.feature, high, low, shift.astype(np.int32), mask, whole, shape)


def _put(part: Scatter, features: Mapping[str, Feature]) -> Put | None:
    """None also where sums are to be made, which floats round in another order."""
    stored = features[part.values]
    is_known = part.dtype.kind in "iu" or (part.dtype.itemsize > 1 and part.dtype.kind != "b")
    if part.duplicates != "last" or not is_known or stored.num_bytes > _MOST_PUT_BYTES:
        return None
    values = Array(part.values, part.dtype)
    shape = stored.row_dtype.shape
    step = _array(values, stored.row_dtype.base.newbyteorder("="), part.dtype, shape)
    if not isinstance(step, (LookUp, Cast)):
        return None
    return Put((part.indices, part.values), step, part.dtype, math.prod(part.shape), part.shape)


def _mask(bit: npt.NDArray[np.intp], bit_order: str) -> npt.NDArray[np.uint8]:
    return np.left_shift(1, bit if bit_order == "little" else 7 - bit).astype(np.uint8)


def _array(part: Array, stored: np.dtype[Any], dtype: np.dtype[Any], shape: Shape) -> Step | None:
    first, count = part.first or 0, math.prod(shape)
    is_plain = part.scale is None and part.offset is None
    if is_plain and stored == dtype:
        return Cast(part.feature, first, count, dtype, None, None, 1, shape)
    if not (holds_numbers(stored) and holds_numbers(dtype)) or "c" in stored.kind + dtype.kind:
        return None
    values = ArrayValues(stored, dtype, part.scale, part.offset, part.wrap)
    if values.checked is not None:  # the workers look for values that the field's integers do not hold
        return None
    if stored.itemsize <= _MAX_TABLE_ITEMSIZE:
        # numpy says nowhere what it makes of bytes other than 0 and 1 as bool.
        if stored.kind == "b" or (stored.kind not in "iu" and integer_limits(dtype) is not None):
            return None
        table = np.empty(1 << 8 * stored.itemsize, dtype)
        values.put(_every(stored), table)
        return LookUp(part.feature, first, count, table, 1, shape)
    if stored.kind in "iu" and dtype.kind in "iu":
        scale, offset = (None if each is None else int(each) for each in (part.scale, part.offset))
        return Cast(part.feature, first, count, dtype, scale, offset, 1, shape)
    if stored.kind in "iu" and is_plain and dtype in (np.float32, np.float64):
        return Cast(part.feature, first, count, dtype, None, None, 1, shape)
    return None


def _as_dtype(step: Step, dtype: np.dtype[Any], features: Mapping[str, Feature]) -> Step | None:
    """The step that makes the same values, cast as a worker casts what a function returns; None: there is none."""
    if isinstance(step, Cast):
        stored = features[step.feature].row_dtype.base.newbyteorder("=")
        if step.dtype == dtype:
            return step
        is_stored = stored == step.dtype and step.scale is None and step.offset is None
        if not is_stored or stored.itemsize > _MAX_TABLE_ITEMSIZE or stored.kind == "b":
            return None
        step = LookUp(step.feature, step.first, step.count, _every(stored), step.repeat, step.shape)
    name = "table" if isinstance(step, LookUp) else "value"
    values = getattr(step, name)
    if values.dtype == dtype:
        return step
    zero = np.zeros((), values.dtype)
    if not is_cast(values.dtype, dtype) or ExactCast(values.dtype, dtype).find_lost(values.reshape(-1)):
        return None
    return None if any(zero.astype(dtype).tobytes()) else replace(step, **{name: values.astype(dtype)})


def _every(stored: np.dtype[Any]) -> AnyArray:
    """All values that ``stored``, a dtype of one or two bytes, can have, in the order of their bits."""
    return np.arange(1 << 8 * stored.itemsize).astype(f"u{stored.itemsize}").view(stored)


def _spread(part: Spread, feature: Feature, stored: np.dtype[Any], shape: Shape) -> Step | None:
    if part.dtype.kind == "c":
        return None
    repeat, values = math.prod(part.shape), SpreadValues(stored, part.dtype, part.scale)
    if isinstance(feature, PackedBits):
        assert part.first is not None
        bits = np.array([0, 1], np.uint8)
        zero, one = values.of(bits)
        if zero != 0 or values.find_lost(bits):
            return None  # 0 times infinity
        place = np.full(repeat, part.first)
        mask = _mask(place % 8, part.bit_order)
        return ExpandBits(part.feature, place // 8, mask, np.full(repeat, one, part.dtype), shape)
    first, count = (0, math.prod(feature.shape)) if part.first is None else (part.first, 1)
    if stored.itemsize <= _MAX_TABLE_ITEMSIZE and stored.kind != "b":
        every = _every(stored)
        return (
            None if values.find_lost(every) else LookUp(part.feature, first, count, values.of(every), repeat, shape)
        )
    # float64 holds integers of 32 bits, so that it makes no difference whether they come that way
    if stored.kind in "iu" and stored.itemsize == 4 and part.scale == 1 and part.dtype in (np.float32, np.float64):
        return Cast(part.feature, first, count, part.dtype, None, None, repeat, shape)
    return None
