"""Padded planes, either bit order, and planes of several features, against numpy's own unpacking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loaderd.errors import SchemaError
from loaderd.schema import (
    Array,
    Bits,
    Fill,
    FixedRecords,
    Float,
    Int64,
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
        (lambda: FixedRecords([("a", [("b", "u1")])]), "must hold values, got the structured"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, said: str):
    with pytest.raises(SchemaError, match=said):
        make()
