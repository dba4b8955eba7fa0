"""Codes of a few bits, of one width and of any, as a plain loop over bits reads them; or damage, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import Codes, PackedBits, PrefixCodes, Raw, Schema
from tests.helpers.decoding import decoded, random_rows, rows_of


def bits_of(record: bytes, order: str) -> str:
    return "".join(f"{byte:08b}"[:: 1 if order == "big" else -1] for byte in record)


def number(bits: str, order: str) -> int:
    return int(bits[:: 1 if order == "big" else -1], 2)


def check(field: Any, num_bits: int, rows: Any, expected: list[Any]) -> None:
    """``expected``: of each record its values; or, as text, what is wrong."""
    schema = Schema({"pad": Raw("u1"), "b": PackedBits(num_bits)}, {"x": field})
    rows = rows_of(schema, b=rows)
    whole = [place for place, each in enumerate(expected) if not isinstance(each, str)]
    assert decoded(schema, rows[whole])["x"].tolist() == [expected[place] for place in whole]
    for place in set(range(len(rows))) - set(whole):
        with pytest.raises(WorkerError, match=rf"^field 'x': expected .*{expected[place]}"):
            decoded(schema, rows[place : place + 1])
    if len(whole) < len(rows):
        with pytest.raises(WorkerError, match="^field 'x': expected"):  # noqa: RUF043
            decoded(schema, rows)


@given(st.data())
def test_codes_of_one_width(data: st.DataObject):
    width, order = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["big", "little"]))
    start, length = data.draw(st.integers(0, 17) | st.just(0)), data.draw(st.integers(1, 40))
    known = data.draw(st.integers(1, 1 << width) | st.just(1 << width))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = data.draw(st.sampled_from([None, rng.integers(0, 99, known), rng.random((known, 4)), np.eye(known)]))
    dtype = data.draw(st.sampled_from(["float64", "float32", "float16"] + ["uint8"] * (values is None)))
    field = Codes("b", width, length, values, start, order, dtype)
    num_bits = start + width * length + data.draw(st.integers(0, 9))
    records = rng.integers(0, 256, (6, -(-num_bits // 8))).astype(np.uint8)
    table, expected = field.table.tolist(), []
    for record in records:
        bits = bits_of(record.tobytes(), order)[start:]
        codes = [number(bits[width * place :][:width], order) for place in range(length)]
        is_known = max(codes) < len(table)
        expected.append([table[code] for code in codes] if is_known else f"found {max(codes)}$")
    check(field, num_bits, records, expected)


@st.composite
def prefix_codes(draw: st.DrawFn) -> list[str]:
    """The leaves of a tree; not all of them, at times."""
    leaves = ["0", "1"]
    for choice in draw(st.lists(st.integers(0, 30), max_size=12)):
        leaf = leaves[choice % len(leaves)]
        if len(leaf) < 8:
            leaves.remove(leaf)
            leaves += [leaf + "0", leaf + "1"]
    return leaves[draw(st.integers(0, 1)) :]


# What is wrong with a record may be several things: any of them is named.
def plainly(field: PrefixCodes, record: bytes, num_bits: int) -> list[int] | int | str:
    bits = bits_of(record, field.bit_order)
    places: dict[int, int] = {}
    for bit, width, symbol in field.fixed:
        place = number(bits[bit : bit + width], field.bit_order)
        if place >= field.num_places:
            return "found"
        if place in places:
            return "found"
        places[place] = symbol
    at = field.start
    symbols = [0] * field.num_places
    for place in field.order or range(field.num_places):
        if place in places:
            symbols[place] = places[place]
            continue
        found = [symbol for symbol, code in enumerate(field.codes) if code and (bits + "0" * 8)[at:].startswith(code)]
        if not found or at >= num_bits:
            return "found"
        symbols[place] = found[0]
        at += len(field.codes[found[0]] or "")
    if at > num_bits:
        return f"codes that end by bit {num_bits}, found"
    return at if field.end else symbols


@given(data=st.data())
def test_prefix_codes(kernels: str, data: st.DataObject):
    codes = [*data.draw(prefix_codes()), None]
    order = data.draw(st.sampled_from(["big", "little"]))
    length = data.draw(st.integers(2, 30))
    fixed = data.draw(st.sampled_from([[], [(3, 4, len(codes) - 1)], [(0, 2, len(codes) - 1), (2, 3, 0)]]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    num_bits = data.draw(st.integers(6 + length, 8 * length + 20))
    places, values = rng.permutation(length) if data.draw(st.booleans()) else None, np.arange(len(codes))
    dtype, end = data.draw(st.sampled_from(["uint8", "int32"])), data.draw(st.booleans())
    field = PrefixCodes("b", codes, length, values, 6, fixed, order, dtype, end, places)
    records = rng.integers(0, 256, (8, -(-num_bits // 8))).astype(np.uint8)
    check(field, num_bits, records, [plainly(field, record.tobytes(), num_bits) for record in records])


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (0b00110100, "expected codes that end by bit 8, found that they end at bit 10 or later"),
        (0b00000011, "expected a place from 0 to 2 of symbol 2, found 3"),
        (0b00000101, "expected each fixed symbol at a place of its own, found two at one"),
        (0b00010010, "expected 1 codes, found bits that begin none of them"),
    ],
)
def test_what_is_damaged_is_named(kernels: str, record: int, text: str):
    field = PrefixCodes("b", ["110000", "00", None], 3, start=4, fixed=[(0, 2, 2), (2, 2, 2)])
    schema = Schema({"b": PackedBits(8)}, {"x": field})
    with pytest.raises(WorkerError, match=f"^field 'x': {text}$"):
        decoded(schema, rows_of(schema, b=[[record]]))


def test_values_of_symbols(kernels: str):
    field = PrefixCodes("b", ["0", "10", "11"], (2, 2), np.eye(3) * 5, bit_order="big", dtype="int16")
    check(field, 8, [[0b10011000]], [[[[0, 5, 0], [5, 0, 0]], [[0, 0, 5], [5, 0, 0]]]])
    assert repr(field).startswith(
        "PrefixCodes(feature='b', codes=('0', '10', '11'), shape=(2, 2), values=<float64 (3, 3)>"
    )


def test_a_chunk_of_many_records():
    schema = Schema({"b": PackedBits(256)}, {"x": Codes("b", 2, 128, np.eye(4)), "y": Codes("b", 2, 128)})
    found = decoded(schema, random_rows(schema, 2000))
    assert (found["x"].argmax(axis=2) == found["y"]).all() and found["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Codes("b", 5, 3), "Codes: width must be at most 4, got 5"),
        (lambda: Codes("b", 2, 3, np.eye(5)), "Codes: values must be an array of numbers for 4 codes at most, got"),
        (lambda: Codes("b", 2, 3, [[1], [1, 2]]), "Codes: values must be an array of numbers"),
        (lambda: Codes("b", 2, 3, "abcd"), "Codes: values must be an array of numbers"),
        (lambda: Codes("b", 2, 3, [0, 300], dtype="uint8"), "Codes: values must be representable in uint8, got 300"),
        (lambda: Codes("b", 2, 3, dtype="S4"), "Codes needs a dtype of numbers"),
        (lambda: Codes("b", 4, 17), "field 'x' needs bits 0…67 of feature 'b', which has 64"),
        (lambda: Codes("c", 4, 1), "feature 'c' must be PackedBits"),
        (lambda: PrefixCodes("b", ["0", "01"], 3), "PrefixCodes: no code may begin another one, got '0' and '01'"),
        (lambda: PrefixCodes("b", ["0", "2"], 3), 'PrefixCodes: codes must be texts such as "0" and "10"'),
        (lambda: PrefixCodes("b", "01", 3), "PrefixCodes: codes must be texts"),
        (lambda: PrefixCodes("b", [None], 3), "PrefixCodes: codes must be texts"),
        (lambda: PrefixCodes("b", ["0" * 9], 3), "of 8 bits at most, or None, of 255 symbols at most, got"),
        (lambda: PrefixCodes("b", ["0", "1"], 3, [7]), "PrefixCodes: values must be for 2 symbols, got 1"),
        (
            lambda: PrefixCodes("b", ["0"], 3, fixed=[(1, 2)]),
            r"each of fixed must be \(bit, width, symbol\), got \(1, 2\)",
        ),
        (lambda: PrefixCodes("b", ["0"], 3, fixed=3), r"fixed must be \(bit, width, symbol\), got 3"),
        (lambda: PrefixCodes("b", ["0"], 3, fixed=[(1, 2, 1)]), "symbol of fixed must be at most 0, got 1"),
        (lambda: PrefixCodes("b", ["0"], 3, order=[0, 2, 2]), "order must have each place from 0 to 2 once, got"),
        (lambda: PrefixCodes("b", ["0"], 2, order=[False, True]), "order must have each place from 0 to 1 once, got"),
        (lambda: PrefixCodes("b", ["0"], 3, order=[0.0, 1, 2]), "order must have each place from 0 to 2 once, got"),
        (lambda: PrefixCodes("b", ["0"], 3, fixed=[(60, 7, 0)]), "the places of fixed must be in the 64 bits of 'b'"),
    ],
)
def test_what_cannot_be(make: Any, text: str):
    with pytest.raises(SchemaError, match=text):
        Schema({"b": PackedBits(64), "c": Raw("u1")}, {"x": make()})
