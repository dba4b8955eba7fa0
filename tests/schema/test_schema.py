"""A schema checks that its parts fit together when it is made, and says what is wrong with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError
from loaderd.schema import (
    Array,
    Bits,
    Derived,
    FieldSpec,
    Fill,
    FixedRecords,
    Float,
    Int64,
    Packed,
    PackedBits,
    Planes,
    Raw,
    Schema,
    Spread,
)


def test_chess_eval_is_what_the_documentation_says():
    schema = loaderd.schemas.chess_eval(value_a=0.8, value_k=600.0, value_b=50.0, dtype="float32")
    assert schema.specs == {
        "board": FieldSpec((8, 8, 24), np.dtype("float32")),
        "flags": FieldSpec((10,), np.dtype("float32")),
        "score": FieldSpec((), np.dtype("float32")),
    }
    assert schema.row_dtype.fields is not None
    assert {name: (dtype.itemsize, offset) for name, (dtype, offset) in schema.row_dtype.fields.items()} == {
        "d": (194, 0),
        "s": (8, 200),
    }
    board: Any = schema.fields["board"]
    assert list(board.order) == [c + 4 * g for c in range(4) for g in range(6)]
    assert list(board.channel_scale) == [1.0] * 6 + [-1.0] * 6 + [1.0] * 6 + [-1.0] * 6


@pytest.mark.parametrize(
    ("kind", "wrong", "meant"),
    [
        (loaderd.Sparse, "bitorder", "bit_order"),
        (loaderd.PrefixCodes, "value", "values"),
        (loaderd.OneHot, "class", "classes"),
        (loaderd.Int64, "padding", "pad"),
        (loaderd.PackedBits, "bits", "num_bits"),
        (loaderd.Derived, "input", "inputs"),
        (loaderd.FixedRecords, "bit", "bits"),
        (loaderd.Schema, "feature", "features"),
    ],
)
def test_a_misspelt_argument_is_told_from_the_one_that_was_meant(kind: Any, wrong: str, meant: str):
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no option '{wrong}'; did you mean {meant}="):
        kind(**{wrong: 0})


def test_features_become_fields_as_they_are_stored():
    schema = Schema.of_stored({"a": PackedBits(20), "b": Float((2,)), "c": Int64()})
    assert schema.specs == {
        "a": FieldSpec((3,), np.dtype("uint8")),
        "b": FieldSpec((2,), np.dtype("float32")),
        "c": FieldSpec((), np.dtype("int64")),
    }
    assert schema.record_bytes == 3 + 2 * 4 + 8


def test_a_row_keeps_its_members_apart_and_aligned():
    schema = Schema(
        {"a": PackedBits(3), "b": Float((2,)), "c": Raw("<u2", (5,)), "d": Int64((2, 2), default=7)},
        {"x": Packed("a")},
    )
    end = 0
    for dtype, offset in (schema.row_dtype.fields or {}).values():
        assert offset >= end and offset % dtype.base.alignment == 0
        end = offset + dtype.itemsize
    assert schema.row_bytes % 8 == 0 and schema.row_bytes >= end
    assert Schema({"d": PackedBits(64)}, {"d": Packed("d")}).row_bytes == 16, "a byte behind bits"


def test_a_row_holds_the_record_key_only_where_it_is_asked_for():
    features = {"a": PackedBits(3), "b": Int64()}

    def schema(random: bool | str) -> Schema:
        derived = Derived(lambda b, *random: b, "b", random=random)
        return Schema(features, {"a": Packed("a"), "y": derived}, {"b": Array("b")})

    plain, random = schema(False), schema("a stream")
    assert (plain.needs_record_key, random.needs_record_key) == (False, True)
    assert (plain.row_bytes, random.row_bytes) == (16, 24)
    assert plain.row_dtype.fields == random.row_dtype.fields
    assert plain.stored_fingerprint == random.stored_fingerprint
    rows = np.zeros((5, 24), np.uint8)
    random.record_keys(rows)[[4, 0]] = [2**64 - 1, 1]
    assert np.flatnonzero(rows).tolist() == [16, *range(4 * 24 + 16, 5 * 24)]
    inner = {"z": Derived(lambda b, random: b, "b", random=True), "b": Array("b")}
    assert Schema(features, {"y": Derived(abs, "z")}, inner).needs_record_key


def test_derived_fields_come_behind_their_inputs():
    schema = Schema(
        {"i": Int64()}, {"c": Derived(np.add, ("a", "b")), "a": Derived(np.negative, "b")}, {"b": Array("i")}
    )
    assert schema.evaluation_order == ["b", "a", "c"]
    assert list(schema.specs) == ["c", "a"]


def test_schemas_that_are_made_alike_are_equal():
    assert loaderd.schemas.chess_eval() == loaderd.schemas.chess_eval()
    assert hash(loaderd.schemas.chess_eval()) == hash(loaderd.schemas.chess_eval())
    assert loaderd.schemas.chess_eval() != loaderd.schemas.chess_eval(value_k=500)
    assert loaderd.schemas.mnist() != loaderd.schemas.chess_eval()
    assert (loaderd.schemas.mnist() == 5) is False

    def schema(number: int, table: Any = (0, 1, 2), names: str = "xy", of: Any = None, default: Any = None) -> Schema:
        table = np.array(table)
        fields: dict[str, Any] = {"x": Array("i"), "y": Array("i", scale=2)}
        function = of or (lambda i, by=number: table[i % 3] * by)
        derived = {"z": Derived(function, "x")}
        return Schema({"i": Int64((2,), default=default)}, {name: fields[name] for name in names} | derived)

    assert schema(1) == schema(1)
    assert schema(1, default=np.zeros(2)) == schema(1, default=np.zeros(2)) != schema(1)
    assert schema(1) != schema(2), "another default of the function"
    assert schema(1) != schema(1, table=(1, 2, 3)), "another closure"
    assert schema(1) != schema(1, names="yx"), "another order of delivery"
    assert schema(1, of=np.abs) == schema(1, of=np.abs) != schema(1, of=np.negative)
    sets = [loaderd.Dataset("a", schema(1)), loaderd.Dataset("b", schema(1))]
    assert loaderd.Concat(sets).schema == schema(1), "sets that agree need not share one object"


def test_features_are_equal_where_their_defaults_are_stored_alike():
    nan = [float("nan"), float("-nan")]
    assert Float(default=nan[0]) == Float(default=nan[0]) != Float(default=0.0)
    assert pickle.loads(pickle.dumps(Raw("<f2", 2, nan))) == Raw("<f2", 2, nan)
    assert Int64(2, default=0) == Int64((2,), default=[0, 0]) != Raw("<i8", 2, 0)
    kept = Int64((2,), default=[np.int64(3), np.array(4)]).default
    assert kept == [3, 4] and {*map(type, kept)} == {int}, "nothing that needs its library"
    assert len({Int64(1, default=[7]), Int64(1, default=[7])}) == 1


@pytest.mark.parametrize(
    "field",
    [
        lambda nan: Fill(nan, (1,)),
        lambda nan: Array("i", "float32", scale=nan, offset=1.0),
        lambda nan: Bits("b", (2,), scale=[1.0, nan]),
        lambda nan: Spread("i", (2,), scale=nan),
        lambda nan: Planes([Fill(1.0, (1,)), Fill(nan, (1,))]),
        lambda nan: Derived(lambda i, by=(1, nan): i * by[1], "x"),
        lambda nan: Derived(partial(np.where, True, np.float32(nan)), "x"),
        lambda nan: Derived(partial(np.take, {"of": [np.array([nan, 2.0])]}), "x"),
    ],
)
def test_nan_equals_nan(field: Callable[[float], Any]):
    """A schema that another process made, or that was made twice, has another object for it."""
    assert field(float("nan")) == field(float("nan")) != field(1.0)
    assert len({field(float("nan")), field(float("nan"))}) == 1
    assert Array("i", scale=1) == Array("i", scale=1.0), "whatever numbers are compared"


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __call__(self, x: Any) -> Any:
        return x


def recursive() -> Any:
    def down(x: Any) -> Any:
        return x if x == 0 else down(x - 1)

    return down


@pytest.mark.parametrize("make", [recursive, Odd])
def test_functions_that_may_differ_are_not_equal(make: Callable[[], Any]):
    one, other = make(), make()
    assert Derived(one, "x") == Derived(one, "x") != Derived(other, "x")


def test_schemas_cross_processes():
    schema = Schema({"i": Int64()}, {"y": Derived(lambda i: i * 2, "x")}, {"x": Array("i")})
    copied = pickle.loads(cloudpickle.dumps(schema))
    assert copied.specs == schema.specs and copied.fields["y"].function(21) == 42
    assert copied.stored_fingerprint == schema.stored_fingerprint


def test_numbers_of_numpy():
    """They are kept as Python's: messages know no others."""
    bits = Bits(
        "b", shape=np.array([2, 3]), start=np.int64(4), channel_order=np.array([2, 0, 1]), scale=np.float32(2)
    )
    assert [type(each) for each in (bits.start, bits.scale, *bits.shape)] == [int, float, int, int]
    assert (bits.channel_order, bits.shape) == ((2, 0, 1), (2, 3))
    assert type(PackedBits(np.uint16(32)).num_bits) is int
    assert Array("i", shape=np.int64(4), scale=np.float64(2)) == Array("i", shape=(4,), scale=2.0)


def test_dtypes_by_any_name():
    assert Bits("b", dtype=np.float16).dtype == np.dtype("float16")

    class Named:  # as tf.float32 is, which this room does not import
        as_numpy_dtype = ml_dtypes.bfloat16

    assert Array("b", dtype=Named()).dtype == np.dtype(ml_dtypes.bfloat16)
    assert Bits("b", dtype="bfloat16").dtype == np.dtype(ml_dtypes.bfloat16)
    assert Bits("b", dtype=">f4").dtype == np.dtype("=f4"), "what is computed has the machine's byte order"
    assert Raw(">u2").value_dtype == np.dtype(">u2"), "what is stored has its own"


BITS = {"b": PackedBits(32)}


def spread(stored: str, shape: Any = (), planes: Any = (2,)) -> Schema:
    return Schema({"r": Raw(stored, shape)}, {"x": Spread("r", planes)})


def cast(stored: Any, dtype: Any) -> Schema:
    return Schema({"r": Raw(stored)}, {"x": Array("r", dtype)})


PAIR = [("a", "u1"), ("b", "<f4")]


@pytest.mark.parametrize(
    ("stored", "dtype", "is_cast"),
    [
        ("f4", "bfloat16", True),
        ("bfloat16", "float8_e5m2", True),
        ("M8[s]", "int64", True),
        ("M8[s]", "M8[ns]", True),
        ("S4", "S6", True),
        ("V4", "V4", True),
        (PAIR, PAIR, True),
        ("S4", "float32", False),
        ("M8[s]", "S20", False),
        ("S4", "S3", False),
        ("S4", "U3", False),
        ("V4", "f4", False),
        ("f4", PAIR, False),
    ],
)
def test_casts_work_or_are_refused(stored: Any, dtype: Any, is_cast: bool):
    if is_cast:
        assert cast(stored, dtype).specs["x"].dtype == Raw(dtype).dtype
        return
    with pytest.raises(SchemaError, match=r"field 'x': feature 'r' of .* cannot be cast to "):
        cast(stored, dtype)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Schema({}, {}), "at least one stored feature and one field"),
        (lambda: PackedBits(0), "num_bits must be a positive integer, got 0"),
        (lambda: PackedBits(True), "num_bits must be a positive integer, got True"),
        (lambda: PackedBits(8, default=7), "default must be bytes or None, got 7"),
        (lambda: PackedBits(16, default=b"abc"), "default must have 2 bytes, got 3"),
        (lambda: Int64((2,), default=[1, 2, 3]), r"default must fit int64 of shape \(2,\)"),
        (lambda: Int64((0,)), "shape must be a tuple of positive integers"),
        (lambda: Raw("object"), "dtype must have a fixed size, got object"),
        (lambda: Raw("float33"), "dtype must be one that numpy or ml_dtypes knows, got 'float33'"),
        (lambda: Bits("b", start=-1), "start must be an integer from 0 on, got -1"),
        (lambda: Bits(3), "Bits: feature must be a name, got 3"),
        (lambda: Array("b", scale="2"), "Array: scale must be a number, got '2'"),
        (lambda: Array("b", shape="ab"), "shape must be a tuple of positive integers, got 'ab'"),
        (lambda: Array("b", shape=(None, 3)), r"shape must be a tuple of positive integers, got \(None, 3\)"),
        (lambda: Bits("b", dtype=None), "dtype must be one that numpy or ml_dtypes knows, got None"),
        (lambda: Bits("b", scale="x"), "scale must be a number, or as many as there are channels, got 'x'"),
        (lambda: Bits("b", shape=(3,), channel_order=5), r"permutation of 0…2 .* got \(5,\)"),
        (lambda: Derived(abs, 5), "each of inputs must be a name, got 5"),
        (lambda: Raw("S"), "dtype must have a fixed size, got .*: S16"),
        (lambda: Derived(abs, "x", dtype="U"), "dtype must have a fixed size, got .*: S16"),
        (lambda: Raw("3u1"), r"that of one value, got .*; give dtype=uint8 and shape=\(3,\)"),
        (lambda: Raw("u1", (1,) * 33), r"Raw: shape must have at most 32 axes, got 33: \(1, 1, "),
        (lambda: spread("u1", 1, (1,) * 32), "field 'x': shape must have at most 32 axes, got 33: "),
        (lambda: spread("S4"), "field 'x' must spread real numbers, got feature 'r' of Raw"),
        (lambda: spread("c8"), "field 'x' must spread real numbers, got feature 'r' of Raw"),
        (
            lambda: Schema.of_stored({"r": Raw("u1", (2**31,))}),
            "Raw: shape must have at most 2147483647 values, got 2147483648",
        ),
        (
            lambda: Schema.of_stored({name: PackedBits(2**33) for name in "ab"}),
            "the features must be 2147483631 bytes a record at most, got 21474836",
        ),
        (lambda: Schema(["a"], {}), "features must be a mapping of names to PackedBits, Raw, Int64, Float or Length"),
        (lambda: Schema({"a": Array("a")}, {}), r"features\['a'\] must be PackedBits, (.|\n)*belongs in fields"),
        (lambda: Schema(BITS, BITS), r"fields\['b'\] must be Bits, .*Planes or Derived, got PackedBits"),
        (lambda: Schema({1: Int64()}, {}), "each key of features must be a name, got 1"),
        (lambda: Bits("b", dtype="U3"), "real number of up to 64 bits or bool, got <U3"),
        (lambda: Bits("b", shape=(3,), channel_order=(0, 1, 1)), r"permutation of 0…2 .* got \(0, 1, 1\)"),
        (lambda: Bits("b", shape=(3,), scale=(1, 2)), r"a number or 3 numbers .* got 2"),
        (lambda: Derived(3, "x"), "function must be callable, or a CFunction, got 3"),
        (lambda: Derived(abs, "x", random=""), "random must be True, False or the name of a stream, got ''"),
        (lambda: Schema(BITS, {"x": Bits("c")}), r"reads feature 'c', which is none of \['b'\]"),
        (lambda: Schema(BITS, {"x": Bits("b", shape=(33,))}), "bits 0…32 of feature 'b', which has 32"),
        (lambda: Schema(BITS, {"x": Array("b")}), "'b' is PackedBits; read it with Bits or Packed"),
        (lambda: Schema({"i": Int64()}, {"x": Bits("i")}), "feature 'i' must be PackedBits, got Int64"),
        (
            lambda: Schema(FixedRecords([("own", "<u8")]), {"x": Bits("own")}),
            r"'own' must be PackedBits, got Raw\n.*FixedRecords\(dtype, bits=\['own'",
        ),
        (lambda: Schema({"i": Int64((4,))}, {"x": Array("i", shape=(3,))}), r"shape \(3,\) must hold 4 values"),
        (
            lambda: Schema({"i": Int64()}, {"x": Array("i", scale=0.5)}),
            "field 'x': scale must be representable in int64, got 0.5",
        ),
        (
            lambda: Schema(BITS, {"x": Derived(abs, "y")}),
            "'x' is derived from 'y', which is no field or intermediate; there are x$",
        ),
        (
            lambda: Schema(BITS, {"x": Derived(abs, "y"), "y": Derived(abs, "x")}),
            "depend on each other in a circle: x → y → x",
        ),
        (lambda: Schema(BITS, {"x": Bits("b")}, {"x": Bits("b")}), "not both"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, text: str):
    with pytest.raises(SchemaError, match=text):
        make()


@pytest.mark.parametrize("kind", ["Int64", "PackedBits", "FixedRecords"])
def test_what_is_derived_from_a_stored_feature_hears_what_to_write(kind: str):
    features: Any = {"s": PackedBits(8) if kind == "PackedBits" else Int64()}
    if kind == "FixedRecords":
        features = FixedRecords(np.dtype([("s", "<i8")]))
    fields = {"b": Derived(abs, "s")}
    with pytest.raises(SchemaError, match=r"'b' is derived from 's', which is a stored feature") as caught:
        Schema(features, fields)
    written = caught.value.hint.removeprefix("Make it one: ").removesuffix(".")
    made = eval(written, {"loaderd": loaderd, "Schema": Schema, "features": features, "fields": fields})
    assert made.made_fields == ["s", "b"]
