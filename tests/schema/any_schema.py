"""Schemas of any kind, for Hypothesis."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from loaderd.randomness import RecordRandom
from loaderd.schema import (
    Array,
    Bits,
    Codes,
    Derived,
    Feature,
    Field,
    Fill,
    Float,
    Int64,
    Length,
    OneHot,
    Packed,
    PackedBits,
    Planes,
    PrefixCodes,
    Raw,
    Scatter,
    Schema,
    Sparse,
    Spread,
)
from loaderd.schema.fields import derived_in
from loaderd.schema.permute import permute

INTEGERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", ">i4", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float8_e4m3", "float32", "float64", ">f8"]
# Many are names of a feature, a field and an intermediate.
NAMES = ["a", "b", "c", "a (stored)", "a (stored) (stored)", "ä"]


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def features(draw: st.DrawFn) -> Feature:
    kind = draw(st.sampled_from([PackedBits, Raw, Int64, Float]))
    if kind is PackedBits:
        return PackedBits(draw(st.integers(1, 80)))
    shape, pad = draw(shapes()), draw(st.sampled_from([None, 1]))
    if kind is not Raw:
        return kind(shape, pad=pad, cut=draw(st.booleans()))
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    return Raw(dtype, shape, pad=None if dtype == "bool" else pad, as_list=bool(shape) and draw(st.booleans()))


@st.composite
def stored_fields(draw: st.DrawFn, stored: dict[str, Feature]) -> Field:
    """A field that is computed from one of the features."""
    name = draw(st.sampled_from(sorted(stored)))
    feature = stored[name]
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    if not isinstance(feature, PackedBits):
        shape = draw(st.sampled_from([None, (feature.num_values,), (1, feature.num_values)]))
        number = st.none() | st.sampled_from([0.0, 1.0] if dtype in INTEGERS else [0.1, -3.0])
        scaled = Array(name, dtype=dtype, scale=draw(number), offset=draw(number), shape=shape, wrap=True)
        some = draw(shapes().filter(lambda shape: math.prod(shape) <= feature.num_values))
        first = draw(st.integers(0, feature.num_values - math.prod(some)))
        fields: list[Field] = [Array(name), scaled, replace(scaled, shape=some, first=first)]
        if feature.value_dtype.kind in "iu":
            fields.append(OneHot(name, draw(st.sampled_from([2, 300])), "zeros", dtype))
        if feature.value_dtype == np.uint8:  # of which each value is an index; some come twice
            fields.append(Scatter(name, name, (256,), dtype=draw(st.sampled_from(["int32", "bfloat16", "float32"]))))
        return draw(st.sampled_from(fields))
    shape = draw(shapes().filter(lambda shape: math.prod(shape) <= feature.num_bits))
    channels = shape[-1] if shape else 1
    scales = st.sampled_from([0.0, 1.0] if dtype in INTEGERS else [0.5, -1.0])
    bits = Bits(
        name,
        shape=shape,
        start=draw(st.integers(0, feature.num_bits - math.prod(shape))),
        channel_order=draw(st.none() | st.permutations(range(channels))),
        scale=draw(st.none() | scales | st.lists(scales, min_size=channels, max_size=channels)),
        dtype=dtype,
    )
    places = st.lists(
        st.integers(-1, feature.num_bits - bits.start - 1), min_size=bits.num_bits, max_size=bits.num_bits
    )
    if feature.num_bits > bits.start:
        order = draw(st.sampled_from(["big", "little"]))
        picked = replace(bits, channel_order=None, places=draw(places), bit_order=order)
    else:
        picked = bits
    sparse = draw(sparse_fields(name, feature.num_bits, stored))
    width = draw(st.integers(1, min(4, feature.num_bits)))
    values = np.random.default_rng(width).integers(0, 2, (1 << width, *draw(st.sampled_from([(), (3,)]))))
    length = draw(st.integers(1, feature.num_bits // width))
    codes = Codes(name, width, (length,), values, feature.num_bits - width * length, sparse.bit_order, dtype)
    fields: list[Field] = [Packed(name), bits, bits, picked, sparse, sparse, codes]
    if feature.num_bits > 1:  # whatever the bits are, they are codes
        length, order = (feature.num_bits // 2,), sparse.bit_order
        fields.append(PrefixCodes(name, ["0", "10", "11"], length, [1, 0, 1], bit_order=order, dtype=dtype))
    return draw(st.sampled_from(fields))


@st.composite
def sparse_fields(draw: st.DrawFn, name: str, num_bits: int, stored: dict[str, Feature]) -> Sparse:
    """Of any kind that no record breaks: it has a table for all, and room for all."""
    start = draw(st.integers(0, num_bits - 1))
    order, k = draw(st.sampled_from(["big", "little"])), draw(st.integers(num_bits, 90))
    options: dict[str, Any] = {"start": start, "bit_order": order, "dtype": draw(st.sampled_from(["int16", "int32"]))}
    options["count"] = draw(st.booleans())
    if draw(st.booleans()):
        return Sparse(name, k, **options)
    if num_bits > 1 and draw(st.booleans()):
        places = num_bits // 2
        codes = PrefixCodes(name, ["0", "10", "11"], places, bit_order=order)
        table = np.random.default_rng(places).integers(-1, 30000, (3, places))
        return Sparse(codes, k, table, dtype=options["dtype"], count=options["count"])
    codes = [each for each in stored if num_codes_of(stored[each]) >= num_bits - start]
    bytes_ = [each for each, feature in stored.items() if isinstance(feature, Raw) and num_codes_of(feature) == 2]
    shape = [256] if bytes_ and draw(st.booleans()) else []
    if shape:
        options["bucket"] = draw(st.sampled_from(bytes_))
    if codes and draw(st.booleans()):
        options["codes"] = draw(st.sampled_from(codes))
        shape += [16, draw(st.integers(1, num_bits - start))]
    else:
        shape += [num_bits - start]
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(-1, 30000, shape)
    return Sparse(name, k, values, **options)


def num_codes_of(feature: Feature) -> int:
    """How many of four bits it holds; 0: it is no feature of bytes."""
    is_bytes = isinstance(feature, PackedBits) or feature.value_dtype in (np.uint8, np.int8)
    return 2 * (feature.num_bits // 8 if isinstance(feature, PackedBits) else feature.num_bytes) if is_bytes else 0


@st.composite
def planes(draw: st.DrawFn, stored: dict[str, Feature], inputs: list[str]) -> Planes:
    """Of any parts; derived ones read some of ``inputs``, if there are any."""
    parts: list[Any] = [Fill(3, (draw(st.integers(1, 2)), 2))]
    for name in draw(st.lists(st.sampled_from(sorted(stored)), max_size=3)):
        feature = stored[name]
        count = feature.num_bits if isinstance(feature, PackedBits) else feature.num_values
        if isinstance(feature, PackedBits) or feature.value_dtype.kind != "c":
            order = draw(st.sampled_from(["big", "little"]))
            parts.append(Spread(name, (1, 2), 0.5, first=draw(st.integers(0, count - 1)), bit_order=order))
    if inputs and draw(st.booleans()):
        parts.append(Derived(halves, draw(st.lists(st.sampled_from(inputs), min_size=1, max_size=2)), random=True))
    return Planes(draw(st.sampled_from([parts, [Planes(parts), *parts]])))


def halves(*inputs: Any) -> npt.NDArray[np.float32]:
    """float32, (n, 1, 2): of what checksum makes."""
    return np.repeat(checksum(*inputs) % 1000 / 2, 2).astype(np.float32).reshape(-1, 1, 2)


def checksum(*inputs: Any) -> npt.NDArray[np.uint64]:
    """Of all bytes of each record's inputs, or random numbers; uint64, (n,)."""
    parts = [
        each.integers(0, 1 << 32)
        if isinstance(each, RecordRandom)
        else np.frombuffer(each.tobytes(), np.uint8).reshape(len(each), -1).sum(axis=1)
        for each in inputs
    ]
    return np.sum(parts, axis=0).astype(np.uint64)


@st.composite
def permuted(draw: st.DrawFn, stored: dict[str, Feature], fields: dict[str, Field]) -> Derived:
    """One of ``fields`` with its values at other places, or 0; by what is drawn at random, or from another field."""
    name = draw(st.sampled_from(list(fields)))
    spec = Schema(stored, fields).spec_of(name)
    size = math.prod(spec.shape)
    inner = draw(st.sampled_from([one for one in (1, 2, 3, size) if size % one == 0]))
    places = draw(st.sampled_from([one for one in (1, 2, 4, size // inner) if size // inner % one == 0]))
    tables = st.lists(st.lists(st.integers(-1, places - 1), min_size=places, max_size=places), min_size=1, max_size=3)
    sources = np.array(draw(tables), np.intp)
    is_random = draw(st.booleans())
    inputs = (name,) if is_random else (name, draw(st.sampled_from(list(fields))))
    dtype = draw(st.sampled_from([spec.dtype, "float32", "bfloat16"])) if spec.dtype.kind in "iub" else spec.dtype
    function = partial(permute, partial(number, len(sources)), sources, inner)
    return Derived(function, inputs, spec.shape, dtype, random="a" if is_random else False)


def number(count: int, of: Any) -> npt.NDArray[np.uint64]:
    """uint64, (n,): below ``count``."""
    return checksum(of) % np.uint64(count)


@st.composite
def schemas(draw: st.DrawFn, derived: bool = True) -> Schema:
    """Of any features and fields; with ``derived``, also Derived ones, with and without randomness."""
    names = st.sampled_from(NAMES)
    stored = draw(st.dictionaries(names, features(), min_size=1, max_size=4))
    stored.update({f"{name} (length)": Length(name) for name, each in stored.items() if each.pad is not None})
    fields = draw(st.dictionaries(names, stored_fields(stored), min_size=1, max_size=5))
    intermediates: dict[str, Field] = {}
    if draw(st.booleans()):
        fields["planes"] = draw(planes(stored, list(fields) if derived else []))
    if derived:
        for name in draw(st.lists(st.sampled_from(["x", "y", "z"]), unique=True)):
            inputs = draw(st.lists(st.sampled_from(list(fields)), min_size=1, max_size=2))
            dtype = draw(st.sampled_from(["uint64", ">u8"]))
            fields[name] = Derived(checksum, inputs, dtype=dtype, random=draw(st.sampled_from([False, True, "a"])))
        plain = {name: field for name, field in fields.items() if not derived_in(field)}
        for name in draw(st.lists(st.sampled_from(["p", "q"]), unique=True)):
            fields[name] = plain[name] = draw(permuted(stored, plain))
        delivered = draw(st.lists(st.sampled_from(list(fields)), min_size=1, unique=True))
        intermediates = {name: field for name, field in fields.items() if name not in delivered}
        fields = {name: fields[name] for name in delivered}
    return Schema(stored, fields, intermediates)
