"""Shape and dtype of a derived field are those of its function, which is tried when the schema is made."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import Array, Bits, Derived, FieldSpec, Fill, Int64, PackedBits, Planes, Schema, Spread
from tests.helpers.decoding import AnyArray, decoded, rows_of


def decode(schema: Schema, **stored: Any) -> dict[str, AnyArray]:
    return decoded(schema, rows_of(schema, **stored))


def derived(function: Callable[..., Any], **keywords: Any) -> Schema:
    """``y`` is derived from ``id``, int64."""
    return Schema({"id": Int64()}, {"y": Derived(function, "id", **keywords)}, {"id": Array("id")})


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda id: id, (), "int64"),
        (lambda id: np.eye(10)[id % 10], (10,), "float64"),
        (lambda id: np.eye(10, dtype="f4")[id % 10][:, None], (1, 10), "float32"),
        (lambda id: 1 / id, (), "float64"),
        (lambda id: id.astype(">u2"), (), "uint16"),
        (lambda id: id.astype("M8[s]"), (), "M8[s]"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_a_function_returns_is_the_field(function: Callable[..., Any], shape: tuple[int, ...], dtype: str):
    schema = derived(function)
    assert schema.spec_of("y") == FieldSpec(shape, np.dtype(dtype))
    ids = np.array([16777217, 3, 2])
    assert decode(schema, id=ids)["y"].tolist() == np.asarray(function(ids)).tolist()


def test_a_function_is_tried_with_zeros_as_it_is_called_later():
    seen: list[Any] = []

    def function(x: AnyArray, text: AnyArray, random: loaderd.RecordRandom) -> AnyArray:
        seen.append((x.shape, x.dtype, x.any(), text.tolist(), random.integers(0, 9).shape, x.flags.writeable))
        return x

    fields = {"y": Derived(function, ("x", "text"), random=True)}
    features = {"b": PackedBits(4), "t": loaderd.Raw("S3")}
    Schema(features, fields, {"x": Bits("b", (2, 2)), "text": Array("t")})
    assert [each[0] for each in seen] == [(2, 2, 2), (3, 2, 2)]
    assert {each[1:3] for each in seen} == {(np.dtype("float32"), False)}
    assert [each[3] for each in seen] == [[b"", b""], [b"", b"", b""]]
    assert [each[4:] for each in seen] == [((2,), False), ((3,), False)]


def test_a_function_of_which_all_is_said_is_not_called():
    derived(os.abort, shape=(), dtype="float32")


def test_nobody_tries_a_function_again():
    calls = []
    schema = derived(lambda id: calls.append(len(id)) or id)
    assert calls == [2, 3]
    again = Schema(schema.features, schema.fields, schema.intermediates)
    copied = pickle.loads(cloudpickle.dumps(schema))  # as workers get it
    assert again == schema and again.specs == copied.specs == schema.specs
    assert calls == [2, 3]


@pytest.mark.parametrize(
    ("function", "keywords", "said", "hint"),
    [
        (
            lambda id: np.eye(10)[id % 10],
            {"shape": ()},
            "field 'y': its function must return shape () for each record, but returned float64 of shape (2, 10) for "
            "2 records and float64 of shape (3, 10) for 3 records",
            "Give the field shape=(10,), or leave shape out.",
        ),
        (
            lambda id: {1: 2}[id[0]],
            {},
            "field 'y': its function was called with 2 records of zeros, to learn its shape and dtype, and raised "
            "KeyError: ",
            "Give the field both, shape=… and dtype=…: then its function is not called before there are records.",
        ),
        (
            lambda id: id[:, None] + id,
            {},
            "int64 of shape (2, 2) for 2 records and int64 of shape (3, 3)",
            "broadcast",
        ),
        (lambda id: id.sum(), {}, "whose first axis is the records, but returned int64 of shape () for 2", ""),
        (lambda id: id[:, None][:, :0], {}, "field 'y': shape must be a tuple of positive integers, got (0,)", ""),
        (
            lambda id: [str(each) for each in id],
            {},
            "field 'y' needs a dtype, as its function returned text",
            'dtype="S16"',
        ),
        (lambda id: [None for each in id], {}, "field 'y' needs a dtype, as its function returned object", ""),
        (
            lambda id: id if len(id) == 2 else id * 0.5,
            {},
            "field 'y' needs a dtype, as its function returned int64",
            "",
        ),
        (lambda id: id * 1j, {"dtype": "f4"}, "must return what float32 can hold, but returned complex128", ""),
    ],
)
def test_what_cannot_be_a_field_is_said_when_the_schema_is_made(
    function: Callable[..., Any], keywords: dict[str, Any], said: str, hint: str
):
    with pytest.raises(SchemaError) as caught:
        derived(function, **keywords)
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_another_shape_than_that_of_the_trial_is_named_with_its_remedy():
    schema = derived(lambda id: np.eye(10)[id % 10], shape=(), dtype="float32")
    with pytest.raises(
        WorkerError, match=r"of shape \(3,\), but its function returned float64 of shape \(3, 10\)"
    ) as caught:
        decode(schema, id=np.arange(3))
    assert caught.value.hint.startswith("If that is right, give the field shape=(10,). It was called with")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_axes_of_length_1_make_no_difference(shape: tuple[int, ...]):
    ids = np.arange(5)
    for keywords in ({}, {"dtype": "int32"}):
        schema = derived(lambda id: id[:, None], shape=shape, **keywords)
        found = decode(schema, id=ids)["y"]
        assert found.shape == (5, *shape) and found.ravel().tolist() == ids.tolist()
    planes = Planes([Derived(lambda id: id[:, None, None, None] * np.ones((4, 4)), "id", shape=(1, 4, 4))])
    found = decode(Schema({"id": Int64()}, {"p": planes}, {"id": Array("id")}), id=ids)["p"]
    assert found.shape == (5, 1, 4, 4) and found[:, 0, 3, 2].tolist() == ids.tolist()


def test_derived_parts_of_planes():
    schema = Schema(
        {"b": PackedBits(64 * 2), "rights": loaderd.Raw("u1", (4,))},
        {
            "board": Planes(
                [
                    Planes([Bits("b", (2, 8, 8), dtype="float64"), Fill(0.5, (1, 8, 8), "float64")]),
                    Derived(lambda rights: rights[:, :2, None, None] * np.ones((8, 8)), "rights"),
                    Spread("b", (1, 8, 8), dtype="float64", first=100),
                    Derived(lambda rights, random: random.random((1, 8, 8)), "rights", random=True),
                ]
            ),
            "noise": Derived(lambda random: random.random((1, 8, 8)), (), random="board"),
        },
        {"rights": Array("rights")},
    )
    assert schema.spec_of("board") == FieldSpec((7, 8, 8), np.dtype("float64"))
    assert len(schema.fields["board"].parts) == 5  # type: ignore[union-attr]
    assert schema.needs_record_key
    assert schema.made_fields == ["rights", "board", "noise"]
    rng = np.random.default_rng(0)
    bits, rights = rng.integers(0, 256, (1000, 16), np.uint8), rng.integers(0, 9, (1000, 4), np.uint8)
    found = decode(schema, b=bits, rights=rights)
    board, unpacked = found["board"], np.unpackbits(bits, axis=1)
    assert (board[:, :2].reshape(1000, -1) == unpacked).all()
    assert (board[:, 2] == 0.5).all()
    assert (board[:, 3:5] == rights[:, :2, None, None]).all()
    assert (board[:, 5] == unpacked[:, 100, None, None]).all()
    assert (board[:, 6:] == found["noise"]).all()  # the same stream


def test_what_a_derived_part_needs_is_asked_of_it():
    fields = {"p": Planes([Fill(0, (1, 2)), Derived(lambda x: x, "x")])}
    with pytest.raises(SchemaError, match="field 'p' is derived from 'x', which is no field or intermediate"):
        Schema({"id": Int64()}, fields)
    with pytest.raises(SchemaError, match="depend on each other in a circle: p → x → p"):
        Schema({"id": Int64()}, {**fields, "x": Derived(lambda p: p, "p")})
    with pytest.raises(SchemaError, match="field 'p', part 1: its function was called with 2 records of zeros"):
        Schema({"id": Int64()}, {"p": Planes([Fill(0, (1,)), Derived(lambda id: 1 / 0, "id")])}, {"id": Array("id")})
