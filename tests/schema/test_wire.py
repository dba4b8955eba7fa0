"""A schema comes back from plain values as it was; whatever else comes is an error, and nothing worse."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import SchemaError
from loaderd.schema import (
    Array,
    Bits,
    Derived,
    Feature,
    Int64,
    Length,
    PackedBits,
    Raw,
    Schema,
    Sparse,
    unpacking_schema,
)
from loaderd.schema.fields import Permuted
from loaderd.schema.wire import MAX_PARTS, from_wire, to_wire
from loaderd.schemas import chess_eval, katago
from tests.schema.any_schema import schemas


def is_dtype(kind: type) -> bool:
    return issubclass(kind, np.generic)


def as_it_travels(feature: Feature) -> Feature:
    """Without what only workers need; a length is a number as any other."""
    if isinstance(feature, Length):
        return Raw("<i4")
    later = {"pad": None, "cut": False, **({"as_list": False} if isinstance(feature, Raw) else {})}
    return feature if isinstance(feature, PackedBits) else replace(feature, **later)


@given(schemas(derived=False))
def test_any_schema_comes_back(schema: Schema) -> None:
    wire = to_wire(schema)
    for received in (msgpack.unpackb(msgpack.packb(wire)), json.loads(json.dumps(wire))):
        found = from_wire(received)
        assert found == Schema({name: as_it_travels(each) for name, each in schema.features.items()}, schema.fields)
        assert list(found.fields) == list(schema.fields)
        assert found.row_dtype == schema.row_dtype


def test_numbers_of_numpy_come_back() -> None:
    fields = {"x": Bits("b", start=np.int64(3), scale=np.float64(2)), "y": Array("i", scale=np.int64(1 << 62))}
    schema = Schema({"b": PackedBits(np.int64(7)), "i": Int64()}, fields)  # type: ignore[arg-type]
    assert from_wire(json.loads(json.dumps(to_wire(schema)))) == schema


@pytest.mark.parametrize("dtype", ["<M8[s]", ">M8[ns]", "<M8[25us]", "<m8[D]", "<M8"])
def test_dates_come_back(dtype: str) -> None:
    schema = Schema({"t": Raw(dtype, (2,))}, {"t": Array("t"), "count": Array("t", "int64")})
    assert from_wire(json.loads(json.dumps(to_wire(schema)))) == schema


NOT_NUMPYS = sorted(name for name, kind in vars(ml_dtypes).items() if isinstance(kind, type) and is_dtype(kind))


@pytest.mark.parametrize("name", NOT_NUMPYS)
def test_each_dtype_of_ml_dtypes_comes_back(name: str) -> None:
    """numpy says of float8_e5m2 that it is a float as its own ones are."""
    schema = Schema.of_stored({"r": Raw(name, (2,))})
    found = from_wire(json.loads(json.dumps(to_wire(schema))))
    assert found == schema and found.specs["r"].dtype.name == name


def test_what_only_workers_need_stays_with_them() -> None:
    schema = Schema({"i": Int64(default=1)}, {"x": Array("i")}, {"y": Derived(abs, "x")})
    assert from_wire(to_wire(schema)) == Schema({"i": Int64()}, {"x": Array("i")})
    with pytest.raises(SchemaError, match="field 'score': a schema that travels must have no Derived field"):
        to_wire(chess_eval())


def test_a_schema_beyond_the_limits_is_refused_where_it_is_sent() -> None:
    features = {str(number): Int64() for number in range(MAX_PARTS + 1)}
    with pytest.raises(SchemaError, match="at most 1000, by name, got"):
        to_wire(Schema(features, {"x": Array("0")}))
    with pytest.raises(SchemaError, match="the features must be 1073741824 bytes a record at most"):
        to_wire(Schema({"r": Raw("u1", (1 << 29, 3))}, {"x": Array("r")}))
    with pytest.raises(SchemaError, match="dtype must be one that numpy or ml_dtypes knows, got 'void96'"):
        to_wire(Schema({"r": Raw("f4,i8")}, {"x": Array("r")}))


def test_a_permutation():
    """Of a board that is turned where it is unpacked."""
    unpacking = unpacking_schema(katago(5, symmetries=range(8)))
    assert isinstance(unpacking.fields["planes"], Permuted)
    assert from_wire(msgpack.unpackb(msgpack.packb(to_wire(unpacking)))) == unpacking


# ------------------------------------------------------------------------------------------------ what means no good

GOOD = to_wire(unpacking_schema(chess_eval()))
BITS = GOOD["fields"]["flags"]
RAW = GOOD["features"]["score"]
INT64, BYTE = {"kind": "Int64", "shape": []}, {"kind": "PackedBits", "num_bits": 8}
DEEP: Any = 1.0
for _ in range(900):
    DEEP = [DEEP]
ARRAY = {"kind": "Array", "feature": "f", "dtype": None, "scale": None, "offset": None, "shape": None}

PERMUTED = {"kind": "Permuted", "of": ARRAY, "number": "f", "sources": [[0]], "inner": 1, "dtype": "<f4"}

MANY_TABLES = {"kind": "Planes", "parts": [{**ARRAY, "dtype": "<f8", "shape": [1, 1]}] * 1000}


def of(stored: Any, **field: Any) -> Any:
    """A schema of one feature and one field of it."""
    return {"features": {"f": stored}, "fields": {"x": field or {"kind": "Packed", "feature": "f"}}}


def test_tables_for_a_device_are_no_larger_than_what_came():
    """A permutation has its places, however many values there are to each; of too many bits there is no list."""
    bits = {"kind": "Bits", "feature": "b", "shape": [1 << 16]}
    permuted = {**PERMUTED, "of": bits, "sources": [[0]] * 256, "inner": 1 << 16}
    features = {"b": {"kind": "PackedBits", "num_bits": 1 << 16}, "f": {**RAW, "dtype": "|u1"}}
    assert peak_bytes({"features": features, "fields": {"x": permuted}}) < 1 << 23
    assert peak_bytes(to_wire(Schema({"b": PackedBits(1 << 33)}, {"x": Sparse("b", 1, dtype="int64")}))) < 1 << 20


def peak_bytes(wire: Any) -> int:
    tracemalloc.start()
    from_wire(wire).device_program()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (None, "a schema must be a mapping of"),
        ({**GOOD, "intermediates": {}}, "a schema must be a mapping of"),
        ({**GOOD, "features": []}, "features must be at most 1000, by name, got"),
        ({**GOOD, "features": {7: RAW}}, "a name must be text"),
        (of({"kind": "Derived", "function": "os.system"}), "must be of the kinds"),
        (of({"kind": ["PackedBits"]}), "must be of the kinds"),
        (of({"kind": "PackedBits"}), "missing 1 required positional argument: 'num_bits'"),
        (
            of({"kind": "PackedBits", "num_bits": 8, "default": b"x"}),
            r"PackedBits must be a mapping of \['num_bits'\]",
        ),
        (
            of(
                {"kind": "PackedBits", "num_bits": 8},
                kind="Spread",
                feature="f",
                first=0,
                shape=[7 << 23],
                dtype="|b1",
            ),
            "the tables of the fields must be 536870912 bytes at most, got 587202560",
        ),
        (
            {"features": {"f": {**RAW, "dtype": "<i2"}}, "fields": {"x": MANY_TABLES, "y": MANY_TABLES}},
            "the tables of the fields must be 536870912 bytes at most, got 1048576000",
        ),
        (of({"kind": "PackedBits", "num_bits": True}), "PackedBits: num_bits must be a positive integer, got True"),
        (of({"kind": "PackedBits", "num_bits": b"8"}), "num_bits must be a number, a list or a short text"),
        (of({"kind": "PackedBits", "num_bits": 10**5000}), "does not hold together"),
        (of({**RAW, "dtype": "O"}), "a dtype must be one such as"),
        (of({**RAW, "dtype": "f4,f4"}), "a dtype must be one such as"),
        (of({**RAW, "dtype": "void64"}), "dtype must be one that numpy or ml_dtypes knows"),
        (of({**RAW, "dtype": "|V8"}), "a dtype must be one such as"),
        (of({**RAW, "dtype": "<M8[xx]"}), "dtype must be one that numpy or ml_dtypes knows"),
        (of({**RAW, "dtype": "<M8[2Y/4]"}), "a dtype must be one such as"),
        (of({**RAW, "shape": [1 << 20] * 32}), "shape must have at most 2147483647 values"),
        (of({**RAW, "shape": [1] * 33}), "shape must have at most 32 axes"),
        (of({**RAW, "shape": [[[[]]]]}), "shape must be a tuple of positive integers"),
        (of({**RAW, "shape": {"a": 1}}), "shape must be a number, a list or a short text"),
        (of({**RAW, "dtype": "<U9999999", "shape": [99]}), "the features must be 1073741824 bytes a record at most"),
        (of(BYTE, **{**BITS, "feature": "f", "shape": [1 << 30]}), "needs bits .* which has 8"),
        (of(BYTE, **{**BITS, "shape": [1 << 30], "channel_order": [1]}), "a permutation of 0…1073741823"),
        (of(BYTE, **{**BITS, "shape": [1 << 30], "scale": [1.0] * 9}), "scale must be"),
        (of(BYTE, **{**BITS, "scale": DEEP}), "does not hold together"),
        (of(INT64, kind="Packed", feature="g"), "reads feature 'g'"),
        (of(INT64, **PERMUTED), "feature 'f' must be one uint8, got"),
        (of(INT64, **{**PERMUTED, "sources": [[0, 2]]}), "tables of places below their length"),
        (of(INT64, **{**PERMUTED, "sources": [[0]] * 257}), "at most 256 tables of places"),
        (of(INT64, **{**PERMUTED, "sources": DEEP}), "does not hold together"),
        (of(INT64, **{**PERMUTED, "of": {**PERMUTED, "of": PERMUTED}}), "permuted once at most"),
        (of(INT64, **{**PERMUTED, "sources": [[-2]]}), "tables of places below their length, or -1"),
        (of({**RAW, "dtype": "|u1"}, **{**PERMUTED, "sources": [[0, 1]]}), "is not made of 2 places"),
        (of(INT64, **{**ARRAY, "scale": float("inf")}), "scale must be representable in int64, got inf"),
        (of(INT64, **{**ARRAY, "scale": 10**5000}), "scale must be a number that float64 can hold"),
        (of(INT64, **{**ARRAY, "scale": "1"}), "scale must be a number, got '1'"),
        (of(INT64, **{**ARRAY, "dtype": "<U9"}), "feature 'f' of int64 cannot be cast to <U9"),
        (
            of({**RAW, "dtype": "<U9"}, **{**ARRAY, "dtype": "<U299999999"}),
            "the fields must be 1073741824 bytes a record at most",
        ),
        (
            of(BYTE, kind="Sparse", feature="f", k=1, table=[0, "x" * 9_000] + [""] * 9_000),
            "table must be lists of num",
        ),
        (of(BYTE, kind="Codes", feature="f", width=1, shape=[1], values=[["x"]]), "values must be lists of numbers"),
        (
            of(BYTE, kind="PrefixCodes", feature="f", codes=["0", "1"], shape=[20_000_000], end=True),
            "20000000 codes from bit 0 on need more than 8 bits",
        ),
    ],
)
def test_what_does_not_fit_is_said(wire: Any, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SchemaError, match=text) as caught:
            from_wire(wire)
        assert len(str(caught.value)) < 500
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def values() -> st.SearchStrategy[Any]:
    """What msgpack can hold, much of it from a good schema."""
    words = st.sampled_from(["kind", "PackedBits", "Bits", "d", "feature", "dtype", "shape", "<f4", "bfloat16", "O"])
    plain = (
        st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=8) | st.text(max_size=8) | words
    )
    return st.recursive(plain, lambda each: st.lists(each) | st.dictionaries(words | st.text(max_size=3), each))


@st.composite
def nearly_good(draw: st.DrawFn) -> Any:
    """A good schema of which some values are others, or gone."""
    wire = json.loads(json.dumps(to_wire(draw(schemas(derived=False)))))
    for _ in range(draw(st.integers(1, 3))):
        at: Any = wire
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], (dict, list)) and draw(st.integers(0, 3)):
                at = at[key]
                continue
            if draw(st.booleans()):
                at[key] = draw(values())
            else:
                del at[key]
            break
    return wire


@given(nearly_good() | values())
def test_garbage_is_an_error_or_a_schema_of_its_own(wire: Any) -> None:
    try:
        schema = from_wire(wire)
    except SchemaError:
        return
    assert from_wire(to_wire(schema)) == schema
