"""Values of several lengths are padded: by numpy and by compiled code as by a plain loop over records."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.decode.example import RecordFault, parse_example
from loaderd.decode.example_rows import RowParser
from loaderd.errors import SchemaError
from loaderd.schema import Array, Float, Int64, PackedBits, Raw, Schema, packed_schema, unpacking_schema
from loaderd.schema.wire import from_wire, to_wire
from tests.decode.example_wire import (
    PADDED,
    bytes_list,
    concatenated,
    entry,
    example,
    float_list,
    int64_list,
    unpacked_float_list,
    unpacked_int64_list,
)

pytestmark = pytest.mark.usefixtures("kernels")

GAMES = Schema(
    {
        "name": Raw("S9", pad=True),
        "moves": Int64((2, 3), pad=-1),
        "clocks": Float((5,), pad=float("nan")),
        "visits": Raw("<u2", (4,), pad=7),
        "title": Raw("U3", pad=True, default="?"),
    },
    {"name": Array("name")},
)


@st.composite
def games(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """A record, and what each of its features holds; None: it is not there."""
    name = draw(st.binary(max_size=9))
    moves = draw(st.lists(st.integers(-3, 300) | st.integers(-(2**63), 2**63 - 1), max_size=6))
    clocks = draw(st.lists(st.floats(width=32, allow_nan=False), max_size=5))
    visits = draw(st.lists(st.integers(0, 2**16 - 1), max_size=4))
    title = draw(st.none() | st.text(st.characters(max_codepoint=0x10000, exclude_categories=["Cs"]), max_size=3))
    packed = draw(st.booleans())
    entries = [
        entry("name", bytes_list(name)),
        entry("moves", (int64_list if packed else unpacked_int64_list)(*moves)),
        entry("clocks", (float_list if packed else unpacked_float_list)(*clocks)),
        entry("visits", bytes_list(np.array(visits, "<u2").tobytes())),
    ]
    if title is not None:
        entries.append(entry("title", bytes_list(title.encode("utf-32-le"))))
    held = {"name": name, "moves": moves, "clocks": clocks, "visits": visits, "title": title}
    return example(*draw(st.permutations(entries))), held


def padded(held: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of a row, one after the other."""
    found: dict[str, list[Any]] = {}
    for name, room, pad in (("moves", 6, -1), ("clocks", 5, float("nan")), ("visits", 4, 7)):
        found[name] = []
        for place in range(room):
            found[name].append(held[name][place] if place < len(held[name]) else pad)
    title = "?" if held["title"] is None else held["title"]
    return {**found, "name": [held["name"].ljust(9, b"\0")], "title": [title.ljust(3, "\0")]}


def rows_of(parser: RowParser, records: list[bytes], schema: Schema) -> Any:
    out = np.full((len(records), schema.row_bytes), 0xEE, np.uint8)
    assert parser.parse(*concatenated(records), out, np.arange(len(records))) == []
    return out.view(schema.row_dtype).reshape(-1)


@settings(max_examples=150)
@given(st.lists(games(), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_records_of_any_length_as_a_plain_loop_pads_them(kinds: list[Any], seed: int) -> None:
    chosen = [kinds[kind] for kind in np.random.default_rng(seed).choice(len(kinds), 40)]  # so layouts are learnt
    rows = rows_of(RowParser(GAMES), [record for record, _ in chosen], GAMES)
    names, titles = (np.ascontiguousarray(rows[name]).view(np.uint8).reshape(40, -1) for name in ("name", "title"))
    for row, name_bytes, title_bytes, (_, held) in zip(rows, names, titles, chosen, strict=True):
        expected = padded(held)
        for name in ("moves", "clocks", "visits"):
            assert np.array_equal(row[name].ravel(), expected[name], equal_nan=name == "clocks"), name
        assert name_bytes.tobytes() == expected["name"][0]
        assert title_bytes.tobytes() == expected["title"][0].encode("utf-32-le")


@pytest.mark.parametrize(
    ("feature", "value", "expected", "found", "remedy"),
    [
        (Int64((4,)), int64_list(1, 2), "feature 'x' of 4 values", "2 values", "and a pad"),
        (Int64(), int64_list(), "feature 'x' of 1 value", "0 values", "and a pad"),
        (Float((4,)), float_list(1), "feature 'x' of 4 values", "1 value", "and a pad"),
        (Raw("S8"), bytes_list(b"123456789"), "feature 'x' of 8 bytes", "9 bytes", "and a pad"),
        (Int64((4,), pad=3), int64_list(*range(5)), "feature 'x' of at most 4 values", "5 values", "room for the"),
        (Raw("<f4", (2,), pad=0), bytes_list(b"12345"), "feature 'x' of whole values of float32", "5 bytes", ""),
        (PackedBits(16), bytes_list(b"abc"), "feature 'x' of 2 bytes", "3 bytes", ""),
    ],
)
def test_another_length_is_named(feature: Any, value: bytes, expected: str, found: str, remedy: str) -> None:
    fault = parse_example(example(entry("x", value)), {"x": feature})
    assert isinstance(fault, RecordFault)
    assert (fault.expected, fault.found) == (expected, found)
    assert fault.remedy.startswith("Change the schema to what the records hold.") and remedy in fault.remedy


def test_a_record_without_the_feature_needs_a_default_all_the_same() -> None:
    fault = parse_example(example(), {"x": Int64((2,), pad=-1)})
    assert isinstance(fault, RecordFault) and "give the feature a default" in fault.remedy
    parsed = parse_example(example(), {"x": Int64((2,), pad=-1, default=4)})
    assert not isinstance(parsed, RecordFault)
    assert np.frombuffer(parsed.values["x"].data, "<i8").tolist() == [4, 4]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int64((2,), pad=True), "Int64: pad must be a value of int64, such as -1, got True"),
        (lambda: Int64((2,), pad=0.5), "Int64: pad must be representable in int64, got 0.5"),
        (lambda: Int64((2,), pad=[1, 2]), "Int64: pad must fit int64 of shape ()"),
        (lambda: Int64((2,), pad="x"), "Int64: pad must be a number, got 'x'"),
        (lambda: Raw("uint8", (2,), pad=-1), "Raw: pad must be representable in uint8, got -1"),
        (lambda: Raw("S4", pad=b" "), "Raw: pad must be True, as text is padded with zeros, got b' '"),
        (lambda: Raw("M8[s]", (2,), pad=True), "Raw: pad must be a value of datetime64[s], such as -1, got True"),
    ],
)
def test_a_pad_that_does_not_fit_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(said)):
        make()


def test_pads_are_compared_and_kept_out_of_what_knows_nothing_of_them() -> None:
    assert Int64((2,), pad=-1) == Int64((2,), pad=np.int64(-1)) != Int64((2,), pad=0) != Int64((2,))
    assert Float((2,), pad=float("nan")) == Float((2,), pad=np.float32("nan"))
    assert Raw("bool", (2,), pad=True).padded(b"\0") == b"\0\1"
    assert repr(Int64((2,))) == "Int64(shape=(2,), default=None)"
    assert repr(Int64((2,), pad=-1)) == "Int64(shape=(2,), default=None, pad=-1)"
    assert GAMES.stored_fingerprint != PADDED.stored_fingerprint
    # What leaves the worker is of one size, so nobody behind it need know.
    wire = to_wire(unpacking_schema(GAMES))
    assert "pad" not in str(wire) and from_wire(wire).specs == GAMES.specs
    assert packed_schema(GAMES).features == GAMES.features
    stored = Schema(GAMES.features, GAMES.fields).as_records().features
    assert list(stored)[len(GAMES.features) :] == ["moves_length", "clocks_length", "visits_length"]
