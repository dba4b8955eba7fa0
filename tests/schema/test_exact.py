"""Casts to integers, dates and text are exact or errors: against Python's own integers, one value after the other."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import Array, Derived, Field, PackedBits, Planes, Raw, Schema, Spread
from loaderd.schema.exact import is_cast
from loaderd.schema.features import resolve_dtype
from loaderd.schema.representable import integer_limits
from tests.helpers.decoding import decoded, rows_of

AnyArray = npt.NDArray[Any]

INTEGERS = ["int8", "uint8", "int16", ">u2", "int32", "uint32", "int64", "uint64", "int4", "uint4"]
FLOATS = ["float16", "float32", ">f8", "bfloat16", "float8_e5m2"]


def limits(dtype: str) -> tuple[int, int]:
    found = integer_limits(resolve_dtype(dtype))
    assert found is not None
    return found


def decode(feature: Any, values: AnyArray, field: Field, **intermediates: Field) -> AnyArray:
    """What ``field`` of feature "f" becomes in one batch of ``values``."""
    schema = Schema({"f": feature}, {"x": field}, intermediates)
    return decoded(schema, rows_of(schema, f=values))["x"]


@st.composite
def stored_values(draw: st.DrawFn, dtype: str, near: tuple[int, ...]) -> AnyArray:
    """(n,): values of ``dtype``, many of them ``near`` these numbers."""
    close = st.builds(lambda number, more: number + more, st.sampled_from(near), st.integers(-2, 2))
    if dtype in INTEGERS:
        least, largest = limits(dtype)
        numbers: Any = st.integers(least, largest) | close.map(lambda number: min(max(number, least), largest))
    else:
        some = st.sampled_from([0.5, -0.5, math.nan, math.inf, -math.inf, 2.0**63, -(2.0**63), 2.0**64])
        numbers = close | st.integers(-300, 300) | some
    values = draw(st.lists(numbers, min_size=1, max_size=5))
    with np.errstate(all="ignore"):
        return np.array(values, np.float64 if dtype in FLOATS else None).astype(resolve_dtype(dtype))


def plain(value: Any) -> Fraction | None:
    """A value as an exact number; None: it is NaN or infinite."""
    number = int(value) if np.asarray(value).dtype.kind in "iu" else float(value)
    return Fraction(number) if math.isfinite(number) else None


@given(st.data())
def test_an_array_of_integers_is_exact_or_an_error(data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from(INTEGERS + FLOATS))
    dtype = data.draw(st.sampled_from(INTEGERS))
    assume(is_cast(resolve_dtype(stored), resolve_dtype(dtype)))  # ml_dtypes has no cast between int4 and uint4
    least, largest = limits(dtype)
    numbers = st.none() | st.sampled_from([0, 1, -1, 2, 3, -5, 100]).filter(lambda n: least <= n <= largest)
    scale, offset = data.draw(numbers), data.draw(numbers)
    bounds = tuple((limit - (offset or 0)) // (scale or 1) for limit in (least, largest))
    values = data.draw(stored_values(stored, (*bounds, least, largest, 2**53)))

    def result(value: Any) -> Fraction | None:
        """None: it is lost. A fraction and what is not finite is lost however it is scaled."""
        number = plain(value)
        if number is None or number.denominator != 1:
            return None
        number = number * (1 if scale is None else scale) + (offset or 0)
        return number if least <= number <= largest else None

    expected = [result(value) for value in values]
    field = Array("f", dtype, scale=scale, offset=offset)
    if scale == 0:  # whatever the value is, it is multiplied by 0
        assume(all(number is not None for number in expected))
    if None in expected:
        with pytest.raises(WorkerError, match=r"field 'x': expected .*, found ") as caught:
            decode(Raw(stored), values, field)
        lost = [str(value) for value, number in zip(values, expected, strict=True) if number is None]
        assert caught.value.message.rpartition("found ")[2] in lost
        assert "wrap=True" in caught.value.hint
        decode(Raw(stored), values, Array("f", dtype, scale=scale, offset=offset, wrap=True))
    else:
        found = decode(Raw(stored), values, field)
        assert [int(value) for value in found] == expected


@given(st.data())
def test_what_a_function_returns_is_exact_or_an_error(data: st.DataObject) -> None:
    returned = data.draw(st.sampled_from(INTEGERS + FLOATS))
    dtype = data.draw(st.sampled_from(INTEGERS))
    assume(is_cast(resolve_dtype(returned), resolve_dtype(dtype)))  # ml_dtypes has no cast between int4 and uint4
    least, largest = limits(dtype)
    values = data.draw(stored_values(returned, (least, largest, 2**53)))
    fits = [
        (number := plain(value)) is not None and number.denominator == 1 and least <= number <= largest
        for value in values
    ]
    field = Derived(lambda f: values.astype(object) if data.draw(st.booleans()) else values, "f", (), dtype)
    where = np.zeros(len(values), np.uint8)
    if all(fits):
        found = decode(Raw("uint8"), where, field, f=Array("f"))
        assert [int(value) for value in found] == [plain(value) for value in values]  # int() of a bfloat16 may wrap
    else:
        with pytest.raises(WorkerError, match=r"derived field 'x': (expected .*, but )?its function "):
            decode(Raw("uint8"), where, field, f=Array("f"))


@given(st.data())
def test_a_spread_of_integers_is_exact_or_an_error(data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from(INTEGERS + FLOATS))
    dtype = data.draw(st.sampled_from(INTEGERS))
    assume(is_cast(resolve_dtype(stored), resolve_dtype(dtype)))  # ml_dtypes has no cast between int4 and uint4
    least, largest = limits(dtype)
    scale = data.draw(st.sampled_from([1.0, 2.0, -1.0, 0.5, 300.0]))
    values = data.draw(stored_values(stored, (int(least / scale), int(largest / scale), 2**53)))

    def result(value: Any) -> int | None:
        number = plain(value)
        if number is None:
            return None
        in_float = stored in FLOATS or not scale.is_integer()
        number = Fraction(float(value) * scale) if in_float else number * int(scale)
        return int(number) if least <= int(number) <= largest else None

    expected = [result(value) for value in values]
    field = Spread("f", (2, 1), scale, dtype)
    if None in expected:
        with pytest.raises(WorkerError, match=r"field 'x': expected values .*, found "):
            decode(Raw(stored), values, field)
    else:
        found = decode(Raw(stored), values, field)
        assert [[int(value) for value in plane.ravel()] for plane in found] == [[number] * 2 for number in expected]


@given(st.data())
def test_a_spread_bit_is_that_bit_of_each_record(data: st.DataObject) -> None:
    num_bits = data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, num_bits - 1))
    bit_order: Any = data.draw(st.sampled_from(["big", "little"]))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
    scale = data.draw(st.sampled_from([1.0, 3.0]))
    stored = np.frombuffer(data.draw(st.binary(min_size=7 * 5, max_size=7 * 5)), np.uint8).reshape(7, 5)
    stored = stored[:, : (num_bits + 7) // 8]
    field = Spread("f", (1, 2, 3), scale, dtype, first=first, bit_order=bit_order)
    found = decode(PackedBits(num_bits), stored, field)
    assert found.shape == (7, 1, 2, 3) and found.dtype == resolve_dtype(dtype)
    for planes, record in zip(found, stored, strict=True):
        digits = "".join(f"{byte:08b}"[:: 1 if bit_order == "big" else -1] for byte in record)
        assert (planes == np.array(int(digits[first]) * scale).astype(found.dtype)).all()


@given(st.data())
def test_one_value_of_a_list_is_spread(data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.integers(-300, 300), min_size=6, max_size=6))).reshape(1, 2, 3)
    first = data.draw(st.integers(0, 5))
    found = decode(Raw(">i2", (2, 3)), values, Spread("f", (2,), 0.5, first=first))
    assert found.tolist() == [[values.ravel()[first] / 2] * 2]


@pytest.mark.parametrize(
    ("feature", "values", "dtype", "lost"),
    [
        (Raw("M8[s]"), np.array(["2020-01-01", "2300-01-01", "NaT"], "M8[s]"), "M8[ns]", "2300-01-01T00:00:00"),
        (Raw("m8[s]"), np.array([5, 300], "m8[s]"), "uint8", "300 seconds"),
        (Raw("float32"), np.array([5, 0.5], "f4"), "m8[s]", "0.5"),
    ],
)
def test_dates_are_exact_or_an_error(feature: Raw, values: AnyArray, dtype: str, lost: str) -> None:
    found = decode(feature, values[:1], Array("f", dtype))
    assert found.tobytes() == values[:1].astype(dtype).tobytes()
    with pytest.raises(WorkerError) as caught:
        decode(feature, values, Array("f", dtype))
    assert caught.value.message.endswith(f"found {lost}")


def test_complex_numbers_are_not_cut_in_half() -> None:
    with pytest.raises(SchemaError, match="complex128 cannot be cast to float32") as caught:
        Schema({"f": Raw("c16")}, {"x": Array("f", "float32")})
    assert "A Derived field can take a part of complex numbers." in caught.value.hint
    with pytest.raises(WorkerError, match=r"cast to float32, of shape .*, but its function returned complex128"):
        decode(Raw("c16"), np.array([1j]), Derived(lambda f: f, "f", (), "float32"), f=Array("f"))


@pytest.mark.parametrize("of_text", [np.array, np.char.decode], ids=["bytes", "text"])
def test_text_is_whole_or_an_error(of_text: Any) -> None:
    def function(f: AnyArray) -> AnyArray:
        return of_text(np.array([b"ab", b"abcdef"]))[f]  # type: ignore[no-any-return]

    field = Derived(function, "f", (), "S4")
    assert decode(Raw("uint8"), np.array([0, 0]), field, f=Array("f")).tolist() == [b"ab", b"ab"]
    with pytest.raises(WorkerError, match=r"values that \|S4 holds, but its function returned b?'abcdef'"):
        decode(Raw("uint8"), np.array([0, 1]), field, f=Array("f"))


def test_floats_round_and_anything_is_true_that_is_not_0() -> None:
    values = np.array([16777217, -(2**62), 0])
    assert decode(Raw("int64"), values, Array("f", "float32")).tolist() == [16777216.0, -(2.0**62), 0]
    assert decode(Raw("int64"), values, Array("f", "bool")).tolist() == [True, True, False]
    assert decode(Raw("float64"), np.array([1e300]), Array("f", "float16")).tolist() == [math.inf]
    assert decode(Raw("float64"), np.array([0.3]), Array("f", "bool")).tolist() == [True]


def test_values_of_a_part_are_named_by_their_part() -> None:
    planes = Planes([Array("f", "uint8", shape=(1,)), Derived(lambda f: f[:, None], "f", (1,), "uint8")])
    with pytest.raises(WorkerError, match=r"^field 'x', part 0: expected values from 0 to 255, .* found 256"):
        decode(Raw("int32"), np.array([256]), planes, f=Array("f"))
