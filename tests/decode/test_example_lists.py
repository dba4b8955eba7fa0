"""Lists of many lengths: by numpy and by compiled code as the plain parser, a plain loop and TensorFlow have them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from loaderd.decode import example_rows
from loaderd.decode.example import RecordFault, parse_example
from loaderd.decode.example_rows import RowParser
from loaderd.decode.example_writer import encode_examples
from loaderd.errors import SchemaError
from loaderd.schema import Array, Feature, Float, Int64, Length, Packed, PackedBits, Raw, Schema
from tests.decode.example_wire import (
    bytes_list,
    concatenated,
    entry,
    example,
    field,
    float_list,
    int64_list,
    mutations,
    unpacked_float_list,
    unpacked_int64_list,
)
from tests.decode.test_example_rows import check

pytestmark = pytest.mark.usefixtures("kernels")

LISTS = Schema(
    {
        "board": PackedBits(24, default=b"abc"),
        "tokens": Int64((5,), pad=-1, default=()),
        "num_tokens": Length("tokens"),
        "clocks": Float((4,), pad=0.5, default=[1.5, 2.5], cut=True),
        "num_clocks": Length("clocks"),
        "words": Raw("S3", (3,), pad=True, as_list=True, default=["a", "bc"]),
        "num_words": Length("words"),
        "codes": Raw("<u2", (2, 2), pad=7, as_list=True, cut=True, default=()),
        "num_codes": Length("codes"),
        "first": Int64((2,), cut=True, default=0),
        "name": Raw("S4", pad=True, cut=True, default=b"none"),
        "num_letters": Length("name"),
        "label": Int64(),
    },
    {"board": Packed("board"), "tokens": Array("tokens"), "num_tokens": Array("num_tokens")},
)
INTEGERS = st.integers(-3, 300) | st.integers(-(2**63), 2**63 - 1)
HELD: dict[str, st.SearchStrategy[Any]] = {
    "tokens": st.lists(INTEGERS, max_size=5),
    "clocks": st.lists(st.floats(width=32, allow_nan=False), max_size=7),
    "words": st.lists(st.binary(max_size=3), max_size=3),
    "codes": st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=3), max_size=4),
    "first": st.lists(INTEGERS, min_size=2, max_size=5),
    "name": st.binary(max_size=6),
}


@st.composite
def records(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """A record, and what each feature holds that it has."""
    held: dict[str, Any] = {name: draw(values) for name, values in HELD.items() if draw(st.booleans())}
    held["label"] = [draw(INTEGERS)]
    entries = [entry("unread", bytes_list(b"x"))] if draw(st.booleans()) else []
    for name, values in held.items():
        if name == "clocks":
            stored = draw(st.sampled_from([float_list, unpacked_float_list]))(*values)
        elif name == "name":
            stored = bytes_list(values)
        elif name in ("words", "codes"):
            stored = bytes_list(*(v if name == "words" else np.array(v, "<u2").tobytes() for v in values))
        else:
            stored = draw(st.sampled_from([int64_list, unpacked_int64_list]))(*values)
        entries.append(entry(name, stored))
    return example(*draw(st.permutations(entries))), held


def padded(held: dict[str, Any]) -> dict[str, Any]:
    """The features of a row, by a loop over values."""
    found: dict[str, Any] = {"label": held["label"][0], "board": list(b"abc")}
    for name, room, pad, default in (("tokens", 5, -1, []), ("clocks", 4, 0.5, [1.5, 2.5])):
        kept = held.get(name, default)[:room]
        found[name], found[f"num_{name}"] = kept + [pad] * (room - len(kept)), len(kept)
    words = held.get("words", [b"a", b"bc"])
    found["words"], found["num_words"] = [word.rstrip(b"\0") for word in words + [b""] * (3 - len(words))], len(words)
    codes = [code[:2] + [7] * (2 - len(code)) for code in held.get("codes", [])][:2]
    found["codes"], found["num_codes"] = codes + [[7, 7]] * (2 - len(codes)), len(codes)
    found["first"] = held.get("first", [0, 0])[:2]
    name = held.get("name", b"none")[:4]
    found["name"], found["num_letters"] = name.rstrip(b"\0"), len(name)
    return found


def rows_of(chosen: list[bytes], schema: Schema = LISTS) -> Any:
    out = np.full((len(chosen), schema.row_bytes), 0xEE, np.uint8)
    assert RowParser(schema).parse(*concatenated(chosen), out, np.arange(len(chosen))) == []
    return out.view(schema.row_dtype).reshape(-1)


@given(st.lists(records(), min_size=1, max_size=6))
def test_any_lists_as_a_plain_loop_and_as_the_plain_parser(drawn: list[tuple[bytes, dict[str, Any]]]) -> None:
    rows = rows_of([record for record, _ in drawn])
    for row, (_, held) in zip(rows, drawn, strict=True):
        assert {name: row[name].tolist() for name in LISTS.features} == padded(held)
    check(RowParser(LISTS), [record for record, _ in drawn], LISTS)
    # What is written of the rows is read as the same rows, and by TensorFlow's protobuf library.
    written = list(encode_examples(rows, LISTS.features))
    assert rows_of(written).tobytes() == rows.tobytes()
    stored = tf.train.Example.FromString(written[0]).features.feature
    assert list(stored["tokens"].int64_list.value) == drawn[0][1].get("tokens", [])
    assert len(stored["words"].bytes_list.value) == rows[0]["num_words"]


@given(st.lists(records(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_damaged_lists_as_the_plain_parser(drawn: list[tuple[bytes, dict[str, Any]]], seed: int) -> None:
    random = np.random.default_rng(seed)
    check(RowParser(LISTS), [mutations(record, random) for record, _ in drawn * 4], LISTS)


def test_tensorflow_reads_the_same_lists() -> None:
    """Ragged and padded, packed by its own protobuf library, and several hundred records at once."""
    random = np.random.default_rng(0)
    written = []
    for _ in range(500):
        values = {
            "tokens": tf.train.Feature(
                int64_list=tf.train.Int64List(value=random.integers(-9, 1 << 40, random.integers(0, 6)))
            ),
            "clocks": tf.train.Feature(float_list=tf.train.FloatList(value=random.random(random.integers(0, 5)))),
            "words": tf.train.Feature(
                bytes_list=tf.train.BytesList(
                    value=[b"xyz"[: 1 + k] for k in random.integers(0, 3, random.integers(4))]
                )
            ),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(random.integers(-9, 9))])),
        }
        some = {name: value for name, value in values.items() if name == "label" or random.random() < 0.9}
        written.append(tf.train.Example(features=tf.train.Features(feature=some)).SerializeToString())
    schema = Schema(
        {
            "tokens": Int64((5,), pad=-1, default=()),
            "n": Length("tokens"),
            "clocks": Float((4,), pad=0.5, default=()),
            "words": Raw("S3", (3,), pad=True, as_list=True, default=()),
            "k": Length("words"),
            "label": Int64(),
        },
        {"label": Array("label")},
    )
    rows = rows_of(written, schema)
    spec = {
        "tokens": tf.io.RaggedFeature(tf.int64),
        "clocks": tf.io.VarLenFeature(tf.float32),
        "words": tf.io.RaggedFeature(tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    theirs = tf.io.parse_example(written, spec)
    clocks = tf.sparse.to_dense(tf.sparse.reset_shape(theirs["clocks"], [500, 4]), 0.5)
    assert np.array_equal(rows["tokens"], theirs["tokens"].to_tensor(-1, shape=[None, 5]))
    assert np.array_equal(rows["n"], theirs["tokens"].row_lengths())
    assert np.array_equal(rows["clocks"], clocks)
    assert np.array_equal(rows["words"], theirs["words"].to_tensor(b"", shape=[None, 3]).numpy().astype("S3"))
    assert np.array_equal(rows["k"], theirs["words"].row_lengths())
    assert np.array_equal(rows["label"], theirs["label"])


def test_no_good_record_goes_through_the_plain_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would cost 80 times as much."""
    monkeypatch.delattr(example_rows, "parse_example")
    chosen = [
        example(entry("tokens", kind(*range(number))), entry("label", int64_list(number)))
        for number in range(6)
        for kind in (int64_list, unpacked_int64_list)
    ]
    assert rows_of(chosen * 200)["num_tokens"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 200


def test_chunks_and_records_that_are_too_large_for_one() -> None:
    schema = Schema({"text": Raw("uint8", (3 << 20,), pad=0), "n": Length("text")}, {"n": Array("n")})
    sizes = [0, 1, 2 << 20, 70_000, 300_000, 3 << 20, 5] * 2
    rows = rows_of([example(entry("text", bytes_list(b"\1" * size))) for size in sizes], schema)
    assert rows["n"].tolist() == rows["text"].sum(axis=1, dtype=np.int64).tolist() == sizes


def many_entries(number: int) -> bytes:
    return example(*[entry("x", int64_list(1))] * number, entry("label", int64_list(4)))


@pytest.mark.parametrize(
    "record",
    [
        many_entries(999),
        many_entries(1000),
        example(entry("label", int64_list(1)), entry("label", int64_list(2))),
        example(field(0x0A, field(0x12, int64_list(3)) + field(0x0A, b"label"))),
        field(0x0A, entry("label", int64_list(1)), 3),
        entry("label", int64_list(1)) * 2,
        b"\x10\x01" + example(entry("label", int64_list(1))),
        example(entry("label", int64_list(1))) + field(0x12, b""),
        b"",
    ],
)
def test_unusual_records_as_the_plain_parser(record: bytes) -> None:
    check(RowParser(LISTS), [record, example(entry("label", int64_list(5)))] * 3, LISTS)


AT_MOST = "feature 'x' of at most"
PAIRS = Raw("<u2", (2, 2), as_list=True)


@pytest.mark.parametrize(
    ("feature", "value", "expected", "found", "remedy"),
    [
        (Int64((2,), pad=0), int64_list(1, 2, 3), f"{AT_MOST} 2 values", "3 values", "cut=True"),
        (Float((2,), cut=True), float_list(1), "feature 'x' of 2 values", "1 value", "and a pad"),
        (Raw("S4"), bytes_list(b"a", b"b"), "one value in feature 'x'", "2 values", "as_list"),
        (Raw("S4", (2,), pad=True, as_list=True), bytes_list(b"", b"", b""), f"{AT_MOST} 2 values", "3 values", ""),
        (Raw("S1", (2,), pad=True, as_list=True), bytes_list(b"xy"), f"value 0 of {AT_MOST} 1 byte", "2 bytes", ""),
        (PAIRS, bytes_list(b"abcd", b"xy"), "value 1 of feature 'x' of 4 bytes", "2 bytes", ""),
        (PAIRS, bytes_list(b"abcd"), "feature 'x' of 2 values", "1 value", ""),
    ],
)
def test_what_does_not_fit_is_named(feature: Feature, value: bytes, expected: str, found: str, remedy: str) -> None:
    record = example(entry("x", value))
    fault = parse_example(record, {"x": feature})
    assert isinstance(fault, RecordFault)
    assert (fault.expected, fault.found) == (expected, found)
    assert remedy in fault.remedy
    check(RowParser(Schema({"x": feature}, {"x": Array("x")})), [record], Schema({"x": feature}, {"x": Array("x")}))


NO_PAD = {"x": Int64((2,)), "n": Length("x")}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int64((2,), cut=1), "Int64: cut must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: Raw("S4", as_list=True), "Raw: as_list needs a shape, whose first axis has a place for each"),
        (lambda: Int64((2,), pad=0, default=[1, 2, 3]), "Int64: default must fit int64 of shape (2,)"),
        (lambda: Int64((2,), default=()), "Int64: default must fit int64 of shape (2,)"),
        (lambda: Length(3), "Length: feature must be a name, got 3"),  # type: ignore[arg-type]
        (lambda: Schema({"n": Length("x")}, {"n": Array("n")}), "got 'x', which is none of that name"),
        (lambda: Schema(NO_PAD, {"n": Array("n")}), "got 'x', which is Int64(shape=(2,)"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(said)):
        make()
