"""A device program, run by numpy, makes what the workers make, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from loaderd import schemas as ready_made
from loaderd.schema import Array, Raw, Schema, Spread, packed_schema
from tests.helpers.decoding import decoded, random_rows
from tests.helpers.device_program import READY_MADE, run
from tests.schema.any_schema import schemas


def check(schema: Schema) -> None:
    rows = random_rows(schema, 9)
    with np.errstate(all="ignore"):
        expected = decoded(schema, rows)
        found = run(schema.device_program(), decoded(packed_schema(schema, for_device=True), rows))
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


@settings(max_examples=500)
@given(schemas())
def test_any_schema(schema: Schema):
    check(schema)


@pytest.mark.parametrize("schema", READY_MADE)
def test_ready_made_schemas(schema: Schema):
    check(schema)


@pytest.mark.parametrize(
    ("schema", "record_bytes"),
    [
        (ready_made.chess_eval(), 198),
        (ready_made.lc0(), 8290),
        (ready_made.lc0(symmetries=(0, 1)), 8291),
        (ready_made.katago(symmetries=range(8)), 5504),
        (ready_made.katago(symmetries=range(8), mask_history=0.02), 5505),
        (ready_made.minigo(symmetries=range(8)), 7590),
        (ready_made.mnist(), 788),
    ],
)
def test_how_little_travels(schema: Schema, record_bytes: int):
    """Of random symmetries, one byte a record."""
    assert packed_schema(schema, for_device=True).record_bytes == record_bytes
    assert packed_schema(schema).record_bytes == record_bytes, "over a network, too"


def test_it_can_be_read():
    lines = str(ready_made.lc0(symmetries=(0, 1)).device_program()).splitlines()
    assert lines[0] == "planes: expand 6656 bits in bytes 0…831 of 'planes (stored)' -> float32 (104, 8, 8)"
    assert lines[6] == "planes: permute all of them by the table of 2 that 'symmetry (drawn)' names -> (112, 8, 8)"


@pytest.mark.parametrize(
    "field",
    [
        Array("n", dtype="float32", scale=math.inf),
        Array("n", dtype="float32", offset=math.nan),
        Array("b", dtype="complex128"),
        Spread("b", (2,), dtype="complex64"),
        Array("n", dtype="uint64", scale=2**63, wrap=True),
    ],
)
def test_what_workers_accept(field: Array | Spread):
    check(Schema({"n": Raw("int32", (2,)), "b": Raw("int8", (2,))}, {"x": field}))
