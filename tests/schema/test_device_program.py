"""A device program, run by numpy, makes what the workers make, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from loaderd import schemas as ready_made
from loaderd.schema import Array, Raw, Schema, Spread, packed_schema
from tests.helpers.decoding import decoded, random_rows
from tests.helpers.device_program import run
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_chess(dtype: str):
    schema = ready_made.chess_eval(dtype=dtype)
    check(schema)
    assert packed_schema(schema, for_device=True).record_bytes <= 198


def test_lc0():
    schema = ready_made.lc0()
    check(schema)
    assert packed_schema(schema, for_device=True).record_bytes < schema.record_bytes / 4
    assert str(schema.device_program()).startswith("planes: expand 6656 bits in bytes 0…831 of 'planes (stored)'")


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
