"""A schema checks that its parts fit together when it is made, and says what is wrong with them."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError
from loaderd.schema import FieldSpec


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


def test_features_become_fields_as_they_are_stored():
    schema = loaderd.Schema.of_stored({"a": loaderd.PackedBits(20), "b": loaderd.Float((2,)), "c": loaderd.Int64()})
    assert schema.specs == {
        "a": FieldSpec((3,), np.dtype("uint8")),
        "b": FieldSpec((2,), np.dtype("float32")),
        "c": FieldSpec((), np.dtype("int64")),
    }
    assert schema.record_bytes == 3 + 2 * 4 + 8


def test_mnist_is_what_the_documentation_says():
    assert loaderd.schemas.mnist().specs == {
        "image": FieldSpec((28, 28, 1), np.dtype("float32")),
        "label": FieldSpec((), np.dtype("int32")),
    }


def test_a_row_keeps_its_members_apart_and_aligned():
    schema = loaderd.Schema(
        {
            "a": loaderd.PackedBits(3),
            "b": loaderd.Float((2,)),
            "c": loaderd.Raw("<u2", (5,)),
            "d": loaderd.Int64((2, 2), default=7),
        },
        {"x": loaderd.Packed("a")},
    )
    end = 0
    for dtype, offset in (schema.row_dtype.fields or {}).values():
        assert offset >= end and offset % dtype.base.alignment == 0
        end = offset + dtype.itemsize
    assert schema.row_bytes % 8 == 0 and schema.row_bytes >= end
    assert loaderd.Schema({"d": loaderd.PackedBits(64)}, {"d": loaderd.Packed("d")}).row_bytes == 16, (
        "a byte behind bits"
    )


def test_a_row_holds_the_record_key_only_where_it_is_asked_for():
    features = {"a": loaderd.PackedBits(3), "b": loaderd.Int64()}

    def schema(random: bool | str) -> loaderd.Schema:
        derived = loaderd.Derived(lambda b, *random: b, "b", random=random)
        return loaderd.Schema(features, {"a": loaderd.Packed("a"), "y": derived}, {"b": loaderd.Array("b")})

    plain, random = schema(False), schema("a stream")
    assert (plain.needs_record_key, random.needs_record_key) == (False, True)
    assert (plain.row_bytes, random.row_bytes) == (16, 24)
    assert plain.row_dtype.fields == random.row_dtype.fields
    assert plain.stored_fingerprint == random.stored_fingerprint
    rows = np.zeros((5, 24), np.uint8)
    random.record_keys(rows)[[4, 0]] = [2**64 - 1, 1]
    assert np.flatnonzero(rows).tolist() == [16, *range(4 * 24 + 16, 5 * 24)]
    inner = {"z": loaderd.Derived(lambda b, random: b, "b", random=True), "b": loaderd.Array("b")}
    assert loaderd.Schema(features, {"y": loaderd.Derived(abs, "z")}, inner).needs_record_key


def test_derived_fields_come_behind_their_inputs():
    schema = loaderd.Schema(
        {"i": loaderd.Int64()},
        {"c": loaderd.Derived(np.add, ("a", "b")), "a": loaderd.Derived(np.negative, "b")},
        {"b": loaderd.Array("i")},
    )
    assert schema.evaluation_order == ["b", "a", "c"]
    assert list(schema.specs) == ["c", "a"]


def test_schemas_cross_processes():
    schema = loaderd.Schema(
        {"i": loaderd.Int64()}, {"y": loaderd.Derived(lambda i: i * 2, "x")}, {"x": loaderd.Array("i")}
    )
    copied = pickle.loads(cloudpickle.dumps(schema))
    assert copied.specs == schema.specs and copied.fields["y"].function(21) == 42
    assert copied.stored_fingerprint == schema.stored_fingerprint


def test_the_fingerprint_is_that_of_the_stored_features():
    def fingerprint(bits: int, scale: float) -> str:
        schema = loaderd.Schema({"b": loaderd.PackedBits(bits)}, {"x": loaderd.Bits("b", shape=(8,), scale=scale)})
        return schema.stored_fingerprint

    assert fingerprint(8, 1.0) == fingerprint(8, 2.0) != fingerprint(16, 1.0)


def test_dtypes_by_any_name():
    assert loaderd.Bits("b", dtype="bfloat16").dtype == np.dtype(ml_dtypes.bfloat16)
    assert loaderd.Bits("b", dtype=">f4").dtype == np.dtype("=f4"), "what is computed has the machine's byte order"
    assert loaderd.Raw(">u2").value_dtype == np.dtype(">u2"), "what is stored has its own"


BITS = {"b": loaderd.PackedBits(32)}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: loaderd.Schema({}, {}), "at least one stored feature and one field"),
        (lambda: loaderd.PackedBits(0), "num_bits must be positive, got 0"),
        (lambda: loaderd.PackedBits(16, default=b"abc"), "default must have 2 bytes, got 3"),
        (lambda: loaderd.Int64((2,), default=[1, 2, 3]), r"default must fit int64 of shape \(2,\)"),
        (lambda: loaderd.Int64((0,)), "shape must be a tuple of positive integers"),
        (lambda: loaderd.Raw("object"), "dtype must have a fixed size, got object"),
        (lambda: loaderd.Raw("float33"), "dtype must be one that numpy or ml_dtypes knows, got 'float33'"),
        (lambda: loaderd.Bits("b", start=-1), "start must not be negative, got -1"),
        (lambda: loaderd.Bits("b", dtype="complex64"), "real number of up to 64 bits or bool, got complex64"),
        (lambda: loaderd.Bits("b", dtype="U3"), "real number of up to 64 bits or bool, got <U3"),
        (lambda: loaderd.Bits("b", shape=(3,), channel_order=(0, 1, 1)), r"permutation of 0…2 .* got \(0, 1, 1\)"),
        (lambda: loaderd.Bits("b", shape=(3,), scale=(1, 2)), r"a number or 3 numbers .* got 2"),
        (lambda: loaderd.Bits("b", scale=-1, dtype="uint8"), "scale must be representable in uint8, got -1"),
        (lambda: loaderd.Bits("b", scale=0.5, dtype="int32"), "scale must be representable in int32, got 0.5"),
        (lambda: loaderd.Derived(3, "x"), "function must be callable, got 3"),
        (lambda: loaderd.Derived(abs, "x", random=""), "random must be True, False or the name of a stream, got ''"),
        (lambda: loaderd.Derived(abs, "x", random=7), "random must be True, False or the name of a stream, got 7"),
        (lambda: loaderd.Schema(BITS, {"x": loaderd.Bits("c")}), r"reads feature 'c', which is none of \['b'\]"),
        (
            lambda: loaderd.Schema(BITS, {"x": loaderd.Bits("b", shape=(33,))}),
            "bits 0…32 of feature 'b', which has 32",
        ),
        (lambda: loaderd.Schema(BITS, {"x": loaderd.Array("b")}), "'b' is PackedBits; read it with Bits or Packed"),
        (
            lambda: loaderd.Schema({"i": loaderd.Int64()}, {"x": loaderd.Bits("i")}),
            "feature 'i' must be PackedBits, got Int64",
        ),
        (
            lambda: loaderd.Schema({"i": loaderd.Int64((4,))}, {"x": loaderd.Array("i", shape=(3,))}),
            r"shape \(3,\) must hold 4 values",
        ),
        (
            lambda: loaderd.Schema({"i": loaderd.Int64()}, {"x": loaderd.Array("i", scale=0.5)}),
            "scale must be a whole number for dtype int64, got 0.5",
        ),
        (
            lambda: loaderd.Schema(BITS, {"x": loaderd.Derived(abs, "y")}),
            "'x' is derived from 'y', which is no field or intermediate",
        ),
        (
            lambda: loaderd.Schema(BITS, {"x": loaderd.Derived(abs, "y"), "y": loaderd.Derived(abs, "x")}),
            "go round in a circle: x → y → x",
        ),
        (lambda: loaderd.Schema(BITS, {"x": loaderd.Bits("b")}, {"x": loaderd.Bits("b")}), "not both"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, text: str):
    with pytest.raises(SchemaError, match=text):
        make()
