"""Padded planes, either bit order, and planes of several features, against numpy's own unpacking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.errors import SchemaError
from loaderd.schema import (
    Array,
    Bits,
    Fill,
    FixedRecords,
    Float,
    Int64,
    Length,
    PackedBits,
    Planes,
    Raw,
    Schema,
    Spread,
    packed_schema,
    unpacking_schema,
)
from loaderd.schema.wire import from_wire, to_wire
from tests.helpers.decoding import decoded, random_rows, rows_of

KERNELS = pytest.mark.parametrize("kernels", ["compiled", "numpy"])


def as_bytes(rows: Any) -> Any:
    return rows.view(np.uint8).reshape(len(rows), -1)


BOARD = Schema(
    {"b": PackedBits(3 * 64), "rights": Raw("u1", (4,)), "clock": Int64(), "mean": Float()},
    {
        "board": Planes(
            [
                Bits("b", (3, 8, 8), bit_order="little"),
                Spread("rights", (8, 8)),
                Spread("clock", (1, 8, 8), scale=1 / 7),
                Fill(0.5, (2, 8, 8)),
                Spread("mean", (1, 8, 8)),
            ]
        ),
        "second": Array("rights", "float32", shape=(), first=1),
    },
)


@KERNELS
def test_planes_of_several_features(kernels: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOADERD_KERNELS", kernels)
    rows = random_rows(BOARD, 600).view(BOARD.row_dtype)[:, 0]
    rows["mean"] = np.random.default_rng(1).random(600)
    found = decoded(BOARD, as_bytes(rows))
    board = found["board"]
    assert board.shape == (600, 11, 8, 8)
    assert (board[:, :3].reshape(600, -1) == np.unpackbits(rows["b"], axis=1, bitorder="little")).all()
    assert (board[:, 3:7] == rows["rights"][:, :, None, None]).all()
    assert (board[:, 7] == (rows["clock"] * (1 / 7)).astype(np.float32)[:, None, None]).all()
    assert (board[:, 8:10] == 0.5).all()
    assert (board[:, 10] == rows["mean"][:, None, None]).all()
    assert (found["second"] == rows["rights"][:, 1]).all()


@settings(max_examples=300)
@given(st.data(), st.integers(1, 40), st.sampled_from(["big", "little"]), st.integers(0, 2**32))
def test_bits_at_any_places(data: st.DataObject, num_bits: int, order: str, seed: int):
    start = data.draw(st.integers(0, num_bits - 1))
    places = data.draw(st.lists(st.integers(-1, num_bits - start - 1), min_size=6, max_size=6))
    bits = Bits("b", (3, 2), start, scale=(1, -2), dtype="int16", bit_order=order, places=places)
    schema = Schema({"a": Raw("u1"), "b": PackedBits(num_bits)}, {"x": bits})
    rows = np.random.default_rng(seed).integers(0, 256, (5, schema.row_bytes), np.uint8)
    assert from_wire(to_wire(schema)).fields == schema.fields
    for row, values in zip(rows, decoded(schema, rows)["x"].reshape(5, 6), strict=True):
        stored = np.unpackbits(row[1:], bitorder=order)  # type: ignore[arg-type]
        expected = [0 if place < 0 else int(stored[start + place]) * (1, -2)[n % 2] for n, place in enumerate(places)]
        assert values.tolist() == expected


def test_planes_travel_packed_and_are_finished_by_the_consumer():
    rows = random_rows(BOARD, 20)
    rows.view(BOARD.row_dtype)["mean"] = 0.25
    packed, unpacking = packed_schema(BOARD), unpacking_schema(BOARD)
    assert packed.record_bytes < BOARD.record_bytes / 50
    for name, values in decoded(unpacking, rows_of(unpacking, **decoded(packed, rows))).items():
        assert values.tobytes() == decoded(BOARD, rows)[name].tobytes()


def test_planes_cross_as_plain_values():
    assert from_wire(to_wire(BOARD)).fields == BOARD.fields
    hostile = to_wire(BOARD)
    hostile["fields"]["board"]["parts"].append(hostile["fields"]["board"])
    with pytest.raises(SchemaError, match="a part of a schema"):
        from_wire(hostile)


PAIR = [("a", "u1"), ("b", "u1")]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Bits("b", (8,), bit_order="middle"), "bit_order must be"),
        (lambda: Bits("b", (2, 9), plane_bytes=1), "planes of 1 bytes must begin at a whole byte and hold"),
        (lambda: Array("b", first=3), "first needs a shape"),
        (lambda: Bits("b", (2,), places=[0]), "places must be 2 numbers of bits, or -1"),
        (lambda: Bits("b", (2,), places=[0, True]), "places must be 2 numbers of bits, or -1"),
        (lambda: Bits("b", (2,), channel_order=[False, True]), "channel_order must"),
        (lambda: Bits("b", (2,), places=[0, 1], channel_order=[1, 0]), "places say all of the order"),
        (lambda: Schema(BOARD.features, {"f": Bits("b", (1,), places=[1 << 20])}), "needs bits 0…1048576 of feature"),
        (lambda: Planes([]), "parts must be Bits, Array, Spread, Fill, Derived or Planes"),
        (lambda: Schema({"r": Raw("u1", (4,))}, {"f": Array("r", shape=(2,), first=3)}), "values 3…4"),
        (
            lambda: Schema(BOARD.features, {"f": Planes([Fill(0, (1, 2)), Fill(0, (1, 3))])}),
            "must differ in their first axis only",
        ),
        (lambda: FixedRecords("f4"), "dtype must be a structured one"),
        (lambda: FixedRecords(BOARD.row_dtype, bits=["x"]), "bits must name fields of"),
        (lambda: FixedRecords(PAIR, bits=5), r"bits must name fields of the dtype, \['a', 'b'\], got \[5\]"),
        (lambda: FixedRecords(PAIR, expect={5: 1, "c": 2}), r"expect must name fields of .*, got \[5, 'c'\]"),
        (lambda: FixedRecords(PAIR, expect=["a"]), r"expect must be a mapping of fields .*, got \['a'\]"),
        (lambda: FixedRecords([*PAIR, *PAIR]), "dtype must be one of numpy's, .*occurs more than once"),
        (
            lambda: FixedRecords({"names": ["a"], "formats": ["u1"], "offsets": [-1]}),
            "dtype must be one of numpy's, .*offset -1 cannot be negative",
        ),
        (lambda: FixedRecords(PAIR, fill={"b": 1}), r"fill must name fields that some of sizes lack, got \['b'\]"),
        (
            lambda: FixedRecords(PAIR, sizes=("a", {1: 1, 2: 2}), fill={"a": 1, "b": 1}),
            r"fill must name fields that some of sizes lack, got \['a'\]",
        ),
        (lambda: FixedRecords(PAIR, sizes=("a", {True: 1, 2: 2})), "sizes must be a field and its values' bytes"),
        (lambda: FixedRecords({"v": Length("w")}), "'v' must be the Length of a feature with a pad, got 'w'"),
        (lambda: FixedRecords([("a", [("b", "u1")])]), "must hold values, got the structured"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, said: str):
    with pytest.raises(SchemaError, match=said):
        make()
