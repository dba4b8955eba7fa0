"""A schema in two steps, server and consumer, makes what it makes in one, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from loaderd.decode.batch_decoder import BatchDecoder
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
from loaderd.schemas import chess_eval, mnist
from tests.schema.any_schema import checksum, schemas

AnyArray = npt.NDArray[Any]


def decoded(schema: Schema, rows: npt.NDArray[np.uint8]) -> dict[str, AnyArray]:
    out = {name: np.empty((len(rows), *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
    with np.errstate(all="ignore"):
        BatchDecoder(schema).decode(rows, out)
    return out


def check(schema: Schema, **stored: AnyArray) -> None:
    """``stored``: what the nine records hold of some features, in place of random bytes."""
    packed, unpacking = packed_schema(schema), unpacking_schema(schema)
    assert packed.features == schema.features
    assert (packed.row_bytes, packed.stored_fingerprint) == (schema.row_bytes, schema.stored_fingerprint)
    assert packed.record_bytes <= schema.record_bytes
    assert list(unpacking.features) == list(packed.fields)
    assert Schema.of_stored(unpacking.features).specs == packed.specs
    assert list(unpacking.specs.items()) == list(schema.specs.items())
    assert all(isinstance(feature, (PackedBits, Raw)) for feature in unpacking.features.values())
    assert not any(isinstance(definition, Derived) for definition in unpacking.fields.values())

    rows = np.random.default_rng(0).integers(0, 256, (9, schema.row_bytes), np.uint8)
    for name, values in stored.items():
        rows.view(schema.row_dtype)[name] = values.reshape(9, -1)
    sent = decoded(packed, rows)
    received = np.zeros(len(rows), unpacking.row_dtype)
    for name, values in sent.items():
        received[name] = values
    found = decoded(unpacking, received.view(np.uint8).reshape(len(rows), -1))
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


def test_mnist() -> None:
    check(mnist(), label=np.arange(9))
    # The label is stored in eight bytes, and delivered in four.
    assert packed_schema(mnist()).fields == {"image_raw": Array("image_raw"), "label": Array("label", dtype="int32")}


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
    assert list(packed_schema(schema).fields) == ["a (stored)", "a"]
