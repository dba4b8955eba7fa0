"""A schema in two steps, server and consumer, makes what it makes in one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from loaderd.schema import (
    Array,
    Bits,
    Derived,
    FieldSpec,
    Int64,
    Packed,
    PackedBits,
    Planes,
    Raw,
    Schema,
    Spread,
    packed_schema,
    unpacking_schema,
)
from loaderd.schemas import chess_eval
from tests.helpers.decoding import decoded, random_rows, rows_of
from tests.schema.any_schema import checksum, schemas


def check(schema: Schema) -> None:
    packed, unpacking = packed_schema(schema), unpacking_schema(schema)
    assert packed.features == schema.features
    assert (packed.row_bytes, packed.stored_fingerprint) == (schema.row_bytes, schema.stored_fingerprint)
    assert packed.record_bytes <= schema.record_bytes
    assert list(unpacking.features) == list(packed.fields)
    assert Schema.of_stored(unpacking.features).specs == packed.specs
    assert list(unpacking.specs.items()) == list(schema.specs.items())
    assert all(isinstance(feature, (PackedBits, Raw)) for feature in unpacking.features.values())
    assert not any(isinstance(definition, Derived) for definition in unpacking.fields.values())
    for_device = packed_schema(schema, for_device=True)
    assert list(packed_schema(unpacking, for_device=True).specs.items()) == list(for_device.specs.items()), (
        "a consumer, who has only the unpacking schema, and the server agree in what a slot holds"
    )

    rows = random_rows(schema, 9)
    with np.errstate(all="ignore"):
        found = decoded(unpacking, rows_of(unpacking, **decoded(packed, rows)))
        for name, values in decoded(schema, rows).items():
            assert found[name].tobytes() == values.tobytes(), name


@given(schemas())
def test_any_schema(schema: Schema) -> None:
    check(schema)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_chess(dtype: str) -> None:
    schema = chess_eval(dtype=dtype)
    check(schema)
    assert packed_schema(schema).specs == {
        "d": FieldSpec((194,), np.dtype("uint8")),
        "score": FieldSpec((), np.dtype("float32")),
    }


def test_what_would_take_more_bytes_stored_is_finished() -> None:
    bits = {"flags": Bits("d", shape=(10,), dtype="bool"), "byte": Bits("d", shape=(8,), dtype="bool")}
    schema = Schema({"d": PackedBits(18 * 8)}, bits)
    assert packed_schema(schema).fields == bits
    # One byte less is fewer than the two fields have together.
    schema = Schema({"d": PackedBits(17 * 8)}, bits)
    assert packed_schema(schema).fields == {"d": Packed("d")}
    assert dict(unpacking_schema(schema).fields) == bits


def test_a_field_that_needs_what_does_not_travel_is_finished() -> None:
    """Of "a" and "b" alone less is made than is stored; the planes need "c", too, which is no smaller as stored."""
    spreads = [Spread(name, shape=(1, 2), scale=0.5, first=0 if name == "a" else None) for name in "abc"]
    schema = Schema(
        {"a": PackedBits(1), "b": Int64(), "c": Raw("int64")},
        {"x": Array("b", dtype="bool", wrap=True), "y": Packed("a"), "planes": Planes(spreads)},
    )
    check(schema)
    assert packed_schema(schema).fields == schema.fields


def test_a_feature_that_travels_takes_no_name_of_a_field() -> None:
    schema = Schema(
        {"a": PackedBits(64), "a (stored)": Raw("uint8", (4,)), "b": Int64()},
        {"x": Bits("a", shape=(8, 8)), "a": Derived(checksum, ("y", "x"), dtype="uint64", random=True)},
        {"y": Array("a (stored)", dtype="float64"), "b": Array("b")},
    )
    check(schema)
    assert list(packed_schema(schema).fields) == ["a (stored) (stored)", "a"]


def test_a_name_does_not_depend_on_what_else_travels() -> None:
    """A device program makes "y" of "a (stored)", but not "x" of "a": that is finished where the batch is packed."""
    schema = Schema(
        {"a": Raw("int32", (4,)), "a (stored)": PackedBits(64)},
        {
            "x": Array("a", dtype="float64", scale=0.1),
            "y": Bits("a (stored)", shape=(8, 8)),
            "a": Derived(checksum, "x"),
        },
    )
    check(schema)
