"""The vectorised parser writes the very rows, and names the very faults, that the plain one would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaderd.decode import example_rows
from loaderd.decode.example import REMEDY_NO_EXAMPLE, RecordFault, parse_example
from loaderd.decode.example_rows import RowParser
from loaderd.schema import Array, Float, Int64, Packed, PackedBits, Schema
from loaderd.schemas import chess_eval
from tests.decode.example_wire import (
    PADDED,
    REQUIRED,
    SCHEMA,
    bytes_list,
    concatenated,
    entry,
    example,
    float_list,
    int64_list,
    messages,
    mutations,
    tensorflow_spec,
    unpacked_float_list,
    unpacked_int64_list,
)
from tests.helpers.guarded import guarded

pytestmark = pytest.mark.usefixtures("kernels")

CHESS = chess_eval()
Rows = npt.NDArray[np.uint8]


def plain_rows(records: Sequence[bytes], schema: Schema) -> tuple[Rows, list[RecordFault]]:
    """What ``RowParser.parse`` must come to."""
    structured = np.zeros(len(records), schema.row_dtype)
    faults = []
    for position, record in enumerate(records):
        parsed = parse_example(record, schema.features, position)
        if isinstance(parsed, RecordFault):
            faults.append(parsed)
            continue
        for name, value in parsed.values.items():
            structured[name][position] = np.frombuffer(value.data, schema.features[name].row_dtype.base).reshape(
                structured[name].shape[1:]
            )
    return structured.view(np.uint8).reshape(len(records), schema.row_bytes), faults


def parse(parser: RowParser, records: Sequence[bytes], schema: Schema) -> tuple[Rows, list[RecordFault]]:
    """Each row where its record says; what is parsed goes to every other row of a larger array, backwards."""
    out = guarded(b"\xee" * (2 * len(records) * schema.row_bytes)).reshape(-1, schema.row_bytes)
    places = np.arange(2 * len(records) - 1, 0, -2)
    faults = parser.parse(*concatenated(records), out, places)
    assert (out[::2] == 0xEE).all(), "no row but those that were asked for is touched"
    return out[places], faults


def check(parser: RowParser, records: Sequence[bytes], schema: Schema = SCHEMA) -> None:
    expected, expected_faults = plain_rows(records, schema)
    out, faults = parse(parser, records, schema)
    assert faults == expected_faults
    assert np.array_equal(out, expected)


def chess_record(random: np.random.Generator, score: int | None = None) -> bytes:
    score = int(random.normal(0, 400)) if score is None else score
    return example(entry("d", bytes_list(random.bytes(194))), entry("s", int64_list(score)))


@pytest.fixture
def plain_parses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of the records that went through the plain parser."""
    positions: list[int] = []

    def counted(record: bytes, features: Any, position: int) -> Any:
        positions.append(position)
        return parse_example(record, features, position)

    monkeypatch.setattr(example_rows, "parse_example", counted)
    return positions


# ---------------------------------------------------------------------------------------------- real records


def test_chess_records_against_tensorflow() -> None:
    random = np.random.default_rng(0)
    records = [chess_record(random) for _ in range(3000)]
    out, faults = parse(RowParser(CHESS), records, CHESS)
    assert faults == []
    theirs = tf.io.parse_example(records, tensorflow_spec(CHESS))
    structured = out.view(CHESS.row_dtype)[:, 0]
    assert np.array_equal(structured["s"], theirs["s"].numpy())
    assert [row.tobytes() for row in structured["d"]] == theirs["d"].numpy().tolist()


def test_a_layout_is_learnt_once(plain_parses: list[int]) -> None:
    random = np.random.default_rng(1)
    parser = RowParser(CHESS)
    for _ in range(3):
        check(parser, [chess_record(random, score) for score in [5, -5, 300, 7] * 100], CHESS)
    assert sorted(plain_parses) == [0, 1, 2]  # varints of one, ten and two bytes: three lengths


def test_rare_layouts(plain_parses: list[int]) -> None:
    """Three of a length are worth a template, once four such have come; two go through the plain parser."""
    random = np.random.default_rng(2)
    parser = RowParser(CHESS)
    for _ in range(6):
        check(parser, [chess_record(random, score) for score in [5] * 20 + [1 << 40] * 3 + [1 << 50] * 2], CHESS)
    assert [plain_parses.count(position) for position in range(20, 25)] == [2, 1, 1, 6, 6]


def test_consecutive_varints() -> None:
    """A board of int64 values: varints of one byte and of two, in runs."""
    schema = Schema({"b": Int64((19, 19)), "t": Float((3,))}, {"b": Array("b"), "t": Array("t")})
    random = np.random.default_rng(3)
    records = [
        example(entry("t", kind(*random.random(3))), entry("b", int64_list(*random.integers(low, high, 361))))
        for low, high in [(0, 128), (128, 16384), (-9, 0)]
        for kind in (float_list, unpacked_float_list)
        for _ in range(30)
    ] + [example(entry("t", float_list(1, 2, 3)), entry("b", unpacked_int64_list(*range(361))))] * 9
    check(RowParser(schema), records, schema)


# ---------------------------------------------------------------------------------------------- every input


def test_every_changed_bit_of_a_record() -> None:
    """Each is another record for the plain parser: other values, another layout or a fault."""
    random = np.random.default_rng(5)
    parser = RowParser(CHESS)
    for score in (300, -300):
        good = chess_record(random, score)
        check(parser, [good] * 8, CHESS)
        changed = []
        for bit in range(8 * len(good)):
            record = bytearray(good)
            record[bit // 8] ^= 1 << bit % 8
            changed.append(bytes(record))
        expected, expected_faults = plain_rows(changed, CHESS)
        out, faults = parse(parser, changed, CHESS)
        assert faults == expected_faults
        assert np.array_equal(out, expected)
        assert 0 < len(faults) < 8 * 40


def test_mutated_records() -> None:
    random = np.random.default_rng(6)
    parser = RowParser(SCHEMA)
    layouts = [
        [*REQUIRED, entry("v", int64_list(1, -2, 300))],
        [entry("comment", bytes_list(b"hello")), *REQUIRED[::-1], entry("r", bytes_list(b"1234"))],
        [*REQUIRED[1:], entry("d", bytes_list(b"xyz")), entry("é", unpacked_float_list(1)), entry("v", b"")],
    ]
    good = [example(*layout) for layout in layouts]
    for _ in range(10):
        records = [good[i] for i in random.integers(0, 3, 400)]
        for position in random.integers(0, 400, 100):
            records[position] = mutations(records[position], random)
        check(parser, records)


@pytest.mark.one_variant
@pytest.mark.parametrize("schema", [SCHEMA, PADDED], ids=["fixed", "padded"])
@settings(suppress_health_check=list(HealthCheck), max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_batches_of_many_layouts(schema: Schema, data: st.DataObject) -> None:
    """Copies of a few records, their bytes changed at random where records of one layout differ, in any order."""
    kinds = data.draw(st.lists(messages(schema), min_size=1, max_size=6))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    parser = RowParser(schema)
    for _ in range(3):
        records = []
        for kind in random.choice(len(kinds), 30):
            record = bytearray(kinds[kind])
            for at in random.integers(0, len(record), 2) if record else ():
                record[at] ^= int(random.integers(0, 128))
            records.append(bytes(record) if random.random() < 0.5 else kinds[kind])
        check(parser, records, schema)


def test_lengths_of_nothing_and_little() -> None:
    schema = Schema({"s": Int64(default=3)}, {"s": Array("s")})
    records = [
        b"",
        b"\x10\x01",
        example(),
        b"\x0a",
        example(entry("s", b"")),
        b"\x10\x01\x10\x01\x10\x01\x10\x01",
    ] * 9
    check(RowParser(schema), records, schema)
    check(RowParser(schema), [], schema)


# ------------------------------------------------------------------------------------------------- faults


_MISSING = "Change the schema to what the records hold, or give the feature a default."


def test_faults_leave_the_neighbours_alone() -> None:
    random = np.random.default_rng(7)
    records = [chess_record(random, 300) for _ in range(50)]
    records[3] = example(entry("d", bytes_list(bytes(190))), entry("s", int64_list(1)))
    records[4] = records[4][:-1]
    records[49] = records[49].replace(b"\x0a\x01s", b"\x0a\x01t")
    check(RowParser(CHESS), records, CHESS)
    out, faults = parse(RowParser(CHESS), records, CHESS)
    assert faults == [
        RecordFault(3, "feature 'd' of 194 bytes", "190 bytes"),
        RecordFault(4, "a tf.train.Example", "a field of 222 bytes where 221 are left at byte 3", REMEDY_NO_EXAMPLE),
        RecordFault(49, "feature 's'", "features ['d', 't']", _MISSING),
    ]
    assert np.flatnonzero(~out.any(axis=1)).tolist() == [3, 4, 49]


# ------------------------------------------------------------------------------------------------- limits


def test_more_lengths_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_rows, "_MAX_LENGTHS", 3)
    parser = RowParser(SCHEMA)
    records = [example(*REQUIRED, entry("x" * (i % 20), b"")) for i in range(200)]
    for _ in range(2):
        check(parser, records)
        assert len(parser._layouts) <= 3


def test_too_many_steps_for_a_template(plain_parses: list[int]) -> None:
    """Varints of one and two bytes by turns: no two of them can be read together."""
    schema = Schema({"b": Int64((1000,))}, {"b": Array("b")})
    records = [example(entry("b", int64_list(*[1, 1000] * 500)))] * 10
    check(RowParser(schema), records, schema)
    assert sorted(plain_parses) == [*range(10)]


def test_padding_and_other_features_of_a_row_are_zero_and_default() -> None:
    schema = Schema({"d": PackedBits(8, default=b"\x07"), "s": Int64(default=9)}, {"d": Packed("d")})
    filled, short = example(entry("d", bytes_list(b"x")), entry("s", int64_list(1))), example()
    out, _ = parse(RowParser(schema), [filled, short] * 20, schema)
    assert out.tolist() == [[120, *[0] * 7, 1, *[0] * 7], [7, *[0] * 7, 9, *[0] * 7]] * 20
