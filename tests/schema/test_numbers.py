"""Numbers, dates and text that users give: what a dtype does not hold is refused, what it holds stays exact."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderd.errors import SchemaError
from loaderd.schema import Array, Bits, Fill, FixedRecords, Float, Int64, PackedBits, Planes, Raw, Schema, Spread
from tests.helpers.decoding import decoded, rows_of

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = float("inf"), float("nan")
NS = np.datetime64("2020-01-01", "ns")


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
        (lambda: scaled(offset=2**63), "offset must be representable in int64, got 9223372036854775808"),
        (lambda: scaled("float16", scale=1e9), "scale must be representable in float16, got 1000000000.0"),
        (lambda: scaled("float16", scale=1e9), "In float16 it would become inf."),
        (lambda: scaled("M8[s]", scale=2), "field 'x': scale needs a dtype of numbers, got datetime64[s]"),
        (lambda: Array("i", offset=10**400), "Array: offset must be a number that float64 can hold"),
        (lambda: Fill(2, (2,), "bool"), "Fill: value must be representable in bool, got 2"),
        (lambda: Fill(8, (2,), "int4"), "Fill: value must be representable in int4, got 8"),
        (lambda: Fill(INF, (2,), "float8_e4m3fn"), "In float8_e4m3fn it would become nan."),
        (lambda: Bits("b", (2,), scale=[1, 300], dtype="int8"), "scale must be representable in int8, got 300"),
        (lambda: Bits("b", (2,), scale="12"), "scale must be a number, or as many as there are channels, got '12'"),
        (lambda: Spread("b", (1,), dtype="f4,i4"), "Spread needs a dtype of numbers, got [('f0', '<f4'), ("),
        (lambda: Spread("b", (1,), NAN, "int8"), "Spread: scale must be finite for dtype int8, got nan"),
        (lambda: Int64(default=1.5), "Int64: default must be representable in int64, got 1.5"),
        (lambda: Int64(default=NS), "Int64: default must be a number, got np.datetime64('2020-01-01T00:00:00.0"),
        (lambda: Float((2,), default=[None, 1]), "Float: default must be a number, got None"),
        (lambda: Raw("c8", default=1 + 1e39j), "Raw: default must be representable in complex64, got 1e+39"),
        (lambda: Raw("f4", default=1j), "Raw: default must be a number, got 1j"),
        (lambda: Raw("S4", 1, [None]), "Raw: default must fit |S4 of shape (1,): [None] would become another"),
        (lambda: Raw("S4", default=b"LCZERO"), "Raw: default must fit |S4 of shape (): b'LCZERO' would become"),
        (lambda: Raw("U2", default="abc"), "Raw: default must fit <U2 of shape (): 'abc' would become"),
        (lambda: Raw("M8[s]", default=NS + 1), "Raw: default must fit datetime64[s] of shape (): np.datetime64("),
        (lambda: Raw("M8[ns]", default="5000-01-01"), "shape (): '5000-01-01' would become another value"),
        (lambda: Raw("m8[s]", default=NS), "Raw: default must fit timedelta64[s] of shape (): np.datetime64("),
        (lambda: records(kind=300), "FixedRecords: expect['kind'] must be representable in uint8, got 300"),
        (lambda: records(size=[1, 2]), "FixedRecords: expect['size'] must fit int16 of shape (2, 3): "),
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


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("M8[s]", NS),
        ("M8[s]", np.datetime64("NaT", "ns")),
        ("M8[ns]", np.array(["2020-01-01", "NaT"], "M8[us]")),
        ("M8[s]", [[NS], [NS + 10**9]]),
        ("M8[s]", np.datetime64("12000", "Y")),
        ("M8[D]", datetime.date(2020, 1, 1)),
        ("m8[s]", np.timedelta64(5 * 10**9, "ns")),
        ("m8[D]", np.timedelta64(2, "W")),
        ("m8[s]", 3),
        ("bfloat16", np.array([1, NAN])),
        ("f4", [INF, NAN]),
        ("c8", [1, 2 + NAN * 1j]),
    ],
)
def test_a_default_is_what_was_given(dtype: str, given: Any) -> None:
    """numpy's own words for dates of nanoseconds are integers."""
    expected = np.asarray(given).astype(Raw(dtype).dtype)
    feature = Raw(dtype, expected.shape, given)
    assert feature.default_bytes == expected.tobytes()
    assert pickle.loads(pickle.dumps(feature)) == feature
    if not np.isnan(expected).any():
        record = FixedRecords([("x", feature.dtype, feature.shape)], expect={"x": given})
        assert record.contradiction(expected.tobytes()) == ""
        assert pickle.loads(pickle.dumps(record)) == record


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
    out = decoded(schema, rows_of(schema, b=[[0xFF]]))
    found = {name: values.ravel().tolist() for name, values in out.items()}
    assert found == {"bits": [number, 1], "filled": [number], "offset": [number]}


@pytest.mark.parametrize("value", [0.1, -3, INF, NAN, 2**70])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_floats_are_rounded(value: float, dtype: str) -> None:
    field = Bits("b", (2,), scale=[value, 1], dtype=dtype)
    assert field.channel_scale.tobytes() == np.array([value, 1], np.float64).astype(field.dtype).tobytes()
    assert np.array_equal(Fill(value, (1,), dtype).value, float(value), equal_nan=True)


def test_a_title_is_no_other_field():
    titled = np.dtype({"names": ["a", "b"], "formats": ["<i4", "u1"], "titles": ["first", None]})
    found = FixedRecords(titled, expect={"a": 7})
    assert list(found) == ["a", "b"]
    with pytest.raises(SchemaError, match="must name fields of the dtype"):
        FixedRecords(titled, expect={"first": 7})
