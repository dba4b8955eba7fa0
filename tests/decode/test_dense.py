"""Values at their indices, and one place of many that is 1, as a plain loop makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import Int64, OneHot, PackedBits, Raw, Scatter, Schema, packed_schema
from tests.helpers.decoding import decoded, rows_of
from tests.helpers.device_program import run

INTEGERS = ["int8", "uint8", "<i2", ">u2", "int32", "uint32", "int64", "uint64"]


@given(st.data())
def test_scattered_values(data: st.DataObject):
    """Also as a device makes them, where it does."""
    count, size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 60))
    stored = data.draw(st.sampled_from(INTEGERS))
    values_dtype, dtype = data.draw(
        st.sampled_from([("f2", "float32"), ("f4", "float32"), ("u1", "bfloat16"), ("i2", "int64"), ("i4", "int32")])
    )
    duplicates = data.draw(st.sampled_from(["last", "sum"] if dtype != "bfloat16" else ["last"]))
    schema = Schema(
        {"i": Raw(stored, count), "v": Raw(values_dtype, count)}, {"x": Scatter("i", "v", size, duplicates, dtype)}
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    least = 0 if "u" in stored else -1
    indices, values = rng.integers(least, size, (5, count)), rng.integers(0, 100, (5, count))
    expected = np.zeros((5, size))
    for record in range(5):
        for index, value in zip(indices[record], values[record], strict=True):
            if index >= 0:
                expected[record, index] = value + (expected[record, index] if duplicates == "sum" else 0)
    rows = rows_of(schema, i=indices, v=values)
    found = decoded(schema, rows)["x"]
    assert found.astype(float).tolist() == expected.tolist()
    packed = decoded(packed_schema(schema, for_device=True), rows)
    assert run(schema.device_program(), packed)["x"].tobytes() == found.tobytes()


@pytest.mark.parametrize("index", [60, -2, 2**62])
def test_an_index_that_there_is_not(index: int):
    """By a device, too: the workers look at what they send."""
    schema = Schema({"i": Int64((3,)), "v": Raw("f2", (3,))}, {"x": Scatter("i", "v", 60)})
    rows = rows_of(schema, i=[[0, 59, -1], [0, index, 1]], v=[[1, 2, 3]] * 2)
    for each in (schema, packed_schema(schema, for_device=True)):
        decoded(each, rows[:1])
        with pytest.raises(WorkerError, match=f"expected indices from 0 to 59, or -1, found {index}"):
            decoded(each, rows)
    assert str(schema.device_program()).startswith("x: put values at 'i'")


@given(st.data())
def test_one_hot(data: st.DataObject):
    stored, shape = data.draw(st.sampled_from(INTEGERS)), data.draw(st.sampled_from([(), (3,), (2, 2)]))
    dtype, outside = (
        data.draw(st.sampled_from(["float32", "bool", "int8"])),
        data.draw(st.sampled_from(["error", "zeros"])),
    )
    classes = data.draw(st.integers(1, 40))
    schema = Schema({"i": Raw(stored, shape)}, {"x": OneHot("i", classes, outside, dtype)})
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.integers(0 if "u" in stored else -1, classes + data.draw(st.integers(0, 1)), (4, *shape))
    rows = rows_of(schema, i=values)
    lost = values[(values < 0) | (values >= classes)]
    for each in (schema, packed_schema(schema, for_device=True)):
        if outside == "error" and lost.size:
            with pytest.raises(WorkerError, match=f"^field 'x': expected integers from 0 to {classes - 1}, found"):
                decoded(each, rows)
        else:
            packed = decoded(each, rows)
            found = packed["x"] if each is schema else run(schema.device_program(), packed)["x"]
            assert found.dtype == dtype
            assert found.astype(int).tolist() == (values[..., None] == np.arange(classes)).astype(int).tolist()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scatter("i", "v", 5, "mean"), 'duplicates must be "last", or "sum" in one of numpy'),
        (lambda: Scatter("i", "v", 5, "sum", "bfloat16"), "in bfloat16"),
        (lambda: Scatter("v", "i", 5), "feature 'v' must hold integers, got Raw"),
        (lambda: Scatter("b", "i", 5), "feature 'b' must hold integers, got PackedBits"),
        (lambda: Scatter("i", "b", 5), "feature 'b' must hold 3 values, as many as there are indices"),
        (lambda: Scatter("i", "w", 5), "feature 'w' must hold 3 values, as many as there are indices"),
        (lambda: Scatter("i", "t", 5), r"\|S2 cannot be cast to float32"),
        (lambda: OneHot("v", 5), "feature 'v' must hold integers"),
        (lambda: OneHot("i", 0), "OneHot: classes must be a positive integer, got 0"),
        (lambda: OneHot("i", 3, "none"), 'OneHot: outside must be "error" or "zeros"'),
        (lambda: OneHot("i", 3, dtype="S1"), "OneHot: dtype needs a dtype of numbers"),
    ],
)
def test_what_cannot_be(make: Any, text: str):
    features = {
        "i": Int64((3,)),
        "v": Raw("f2", (3,)),
        "w": Raw("f2", (4,)),
        "t": Raw("S2", (3,)),
        "b": PackedBits(8),
    }
    with pytest.raises(SchemaError, match=text):
        Schema(features, {"x": make()})
