"""Scales, offsets and values: what a dtype does not hold is refused when it is given, what it holds stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import SchemaError
from loaderd.schema import Array, Bits, Fill, FixedRecords, Int64, PackedBits, Planes, Raw, Schema, Spread

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = float("inf"), float("nan")


def records(**expect: Any) -> FixedRecords:
    return FixedRecords(
        [("version", "<u4"), ("kind", "u1"), ("size", "<i2", (2, 3)), ("share", "<f4")], expect=expect
    )


def scaled(dtype: str | None = None, **numbers: Any) -> Schema:
    return Schema({"i": Int64()}, {"x": Array("i", dtype, **numbers)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: scaled("uint8", scale=300), "field 'x': scale must be representable in uint8, got 300"),
        (lambda: scaled("uint8", scale=300), "uint8 holds whole numbers from 0 to 255."),
        (lambda: scaled("uint8", offset=-1), "field 'x': offset must be representable in uint8, got -1"),
        (lambda: scaled(scale=INF), "field 'x': scale must be representable in int64, got inf"),
        (lambda: scaled(scale=NAN), "field 'x': scale must be representable in int64, got nan"),
        (lambda: scaled(offset=2**63), "offset must be representable in int64, got 9223372036854775808"),
        (lambda: scaled("float16", scale=1e9), "scale must be representable in float16, got 1000000000.0"),
        (lambda: scaled("float16", scale=1e9), "In float16 it would become inf."),
        (lambda: scaled("S4", scale=2), "field 'x': scale needs a dtype of numbers, got |S4"),
        (lambda: Array("i", offset=10**400), "Array: offset must be a number that float64 can hold"),
        (lambda: Fill(-1, (2,), "uint8"), "Fill: value must be representable in uint8, got -1"),
        (lambda: Fill(300, (2,), "uint8"), "Fill: value must be representable in uint8, got 300"),
        (lambda: Fill(0.5, (2,), "int32"), "Fill: value must be representable in int32, got 0.5"),
        (lambda: Fill(2, (2,), "bool"), "Fill: value must be representable in bool, got 2"),
        (lambda: Fill(8, (2,), "int4"), "Fill: value must be representable in int4, got 8"),
        (lambda: Fill(INF, (2,), "float8_e4m3fn"), "In float8_e4m3fn it would become nan."),
        (lambda: Bits("b", scale=1e9, dtype="float16"), "Bits: scale must be representable in float16"),
        (lambda: Bits("b", (2,), scale=[1, 300], dtype="int8"), "scale must be representable in int8, got 300"),
        (lambda: Spread("b", (1,), NAN, "int8"), "Spread: scale must be finite for dtype int8, got nan"),
        (lambda: Int64(default=1.5), "Int64: default must fit int64 of shape (): 1.5 would become another value"),
        (
            lambda: records(version=6.5),
            "FixedRecords: expect['version'] must fit uint32 of shape (): 6.5",
        ),
        (lambda: records(kind=300), "FixedRecords: expect['kind'] must fit uint8 of shape (): "),
        (lambda: records(kind=-1), "FixedRecords: expect['kind'] must fit uint8 of shape (): "),
        (lambda: records(kind="one"), "FixedRecords: expect['kind'] must fit uint8 of shape (): "),
        (lambda: records(size=[1, 2]), "FixedRecords: expect['size'] must fit int16 of shape (2, 3): "),
        (
            lambda: FixedRecords([("magic", "S4")], expect={"magic": b"LCZERO"}),
            "FixedRecords: expect['magic'] must fit |S4 of shape (): b'LCZERO' would become",
        ),
        (lambda: Raw("S4", default=b"LCZERO"), "Raw: default must fit |S4 of shape (): b'LCZERO' would become"),
        (lambda: Raw("U2", default="abc"), "Raw: default must fit <U2 of shape (): 'abc' would become"),
        (lambda: records(size=[1, [2]]), "FixedRecords: expect['size'] must fit int16 of shape (2, 3): "),
    ],
)
def test_what_a_dtype_does_not_hold_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        make()
    assert said in str(caught.value)


def test_what_is_expected_may_be_rounded_and_of_fewer_dimensions() -> None:
    found = records(share=0.1, size=[1, 2, 3])
    record = np.zeros(1, found.dtype)
    record["share"], record["size"] = 0.1, [1, 2, 3]
    assert found.contradiction(record.tobytes()) == ""
    record["size"][0, 1, 2] = 4
    assert found.contradiction(record.tobytes()).startswith("size [[1, 2, 3], [1, 2, 4]] where")


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**63 - 1])
def test_integers_stay_exact(number: int) -> None:
    schema = Schema(
        {"b": PackedBits(2), "i": Int64()},
        {
            "bits": Bits("b", (2,), scale=[number, 1], dtype="int64"),
            "filled": Planes([Fill(number, (1,), "int64")]),
            "offset": Array("i", offset=number),
        },
    )
    rows = np.zeros(1, schema.row_dtype)
    rows["b"] = 0xFF
    out = {name: np.empty((1, *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
    BatchDecoder(schema).decode(rows.view(np.uint8).reshape(1, -1), out)
    found = {name: values.ravel().tolist() for name, values in out.items()}
    assert found == {"bits": [number, 1], "filled": [number], "offset": [number]}


@pytest.mark.parametrize("value", [0.1, -3, INF, NAN, 2**70])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_floats_are_rounded(value: float, dtype: str) -> None:
    field = Bits("b", (2,), scale=[value, 1], dtype=dtype)
    assert field.channel_scale.tobytes() == np.array([value, 1], np.float64).astype(field.dtype).tobytes()
    assert np.array_equal(Fill(value, (1,), dtype).value, float(value), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_that_no_dtype_of_integers_holds_scale_floats(dtype: str) -> None:
    schema = scaled(dtype, scale=2**70)
    out = {"x": np.zeros(1, schema.specs["x"].dtype)}
    rows = np.ones(1, schema.row_dtype).view(np.uint8).reshape(1, -1)
    BatchDecoder(schema).decode(rows, out)
    assert float(out["x"][0]) == 2.0**70


def test_bytes_that_no_record_need_hold_warn_nobody() -> None:
    fields = {"spread": Spread("r", (1,), 1e300, "float16"), "array": Array("r", "float16", scale=600)}
    BatchDecoder(Schema({"r": Raw("uint8")}, fields))


def test_a_title_is_no_other_field():
    titled = np.dtype({"names": ["a", "b"], "formats": ["<i4", "u1"], "titles": ["first", None]})
    found = FixedRecords(titled, expect={"a": 7})
    assert list(found) == ["a", "b"]
    with pytest.raises(SchemaError, match="must name fields of the dtype"):
        FixedRecords(titled, expect={"first": 7})
