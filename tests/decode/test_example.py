"""The plain parser reads what TensorFlow reads, and calls everything else a fault."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loaderd.decode.example
from loaderd.decode.example import (
    REMEDY_NO_EXAMPLE,
    Example,
    RecordFault,
    feature_lists,
    list_features,
    parse_example,
)
from loaderd.schema import Feature, Float, Int64, Raw, Schema
from tests.decode.example_wire import (
    REQUIRED,
    SCHEMA,
    TensorFlowParser,
    bytes_list,
    entry,
    example,
    int64_list,
    is_valid_protobuf,
    messages,
    mutations,
    unpacked_float_list,
    unpacked_int64_list,
)
from tests.helpers.record_bytes import field, varint

D, S, F = REQUIRED
tensorflow_reads = TensorFlowParser(SCHEMA, example(*REQUIRED))


def check(record: bytes, schema: Schema = SCHEMA, tensorflow: TensorFlowParser = tensorflow_reads) -> bool:
    """Assert that the parser agrees with TensorFlow; whether it reads the record."""
    ours = parse_example(record, schema.features)
    theirs = tensorflow(record)
    if isinstance(ours, Example):
        assert {name: value.data for name, value in ours.values.items()} == theirs
        return True
    if theirs is not None:
        # Damage that TensorFlow does not notice; protobuf does.
        # And where a feature has a default, TensorFlow does not notice that the record has it as a list.
        is_list = ours.found.endswith("in the record's feature_lists")
        assert is_list or (ours.expected == "a tf.train.Example" and not is_valid_protobuf(record))
    return False


def values_of(record: bytes) -> dict[str, Any]:
    """Each feature of SCHEMA as numbers or bytes, after ``check``."""
    assert check(record)
    parsed = parse_example(record, SCHEMA.features)
    assert isinstance(parsed, Example)
    return {
        name: np.frombuffer(parsed.values[name].data, feature.row_dtype.base).tolist()
        for name, feature in SCHEMA.features.items()
    }


def fault_of(*entries: bytes) -> tuple[str, str]:
    record = example(*entries)
    assert not check(record)
    fault = parse_example(record, SCHEMA.features, position=7)
    assert isinstance(fault, RecordFault)
    assert fault.record == 7
    return fault.expected, fault.found


def test_a_feature_that_is_a_list_is_named() -> None:
    """Also one with a default, which must not stand in for what is there."""
    ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
    record = tf.train.SequenceExample(
        context=tf.train.Features(feature={"id": ids}),
        feature_lists=tf.train.FeatureLists(feature_list={"moves": tf.train.FeatureList(feature=[ids, ids])}),
    ).SerializeToString()
    assert feature_lists(record) == ["moves"] and feature_lists(example(*REQUIRED)) == []
    assert isinstance(parse_example(record, {"id": Int64()}), Example)
    assert isinstance(parse_example(record, {"id": Int64(), "other": Int64(default=7)}), Example)
    for moves in (Int64(), Int64(default=7)):
        fault = parse_example(record, {"id": Int64(), "moves": moves})
        assert isinstance(fault, RecordFault) and fault.expected == "feature 'moves'"
        assert fault.found == "'moves' in the record's feature_lists" and "only the context is read" in fault.remedy


@pytest.mark.parametrize("second", [b"", b"junk", field(0x0A, b"junk"), field(0x0A, field(0x0A, b"id"))])
def test_another_field_of_that_number_is_skipped(second: bytes) -> None:
    record = example(*REQUIRED) + field(0x12, second)
    assert feature_lists(record) == [] and check(record)


# --------------------------------------------------------------------------------------- against TensorFlow


@settings(suppress_health_check=list(HealthCheck), max_examples=settings.default.max_examples // 3)
@given(messages())
def test_reads_what_tensorflow_reads(record: bytes) -> None:
    check(record)


@given(st.binary(max_size=40))
def test_arbitrary_bytes(record: bytes) -> None:
    check(record)


def test_every_truncation() -> None:
    record = example(*REQUIRED, entry("v", unpacked_int64_list(1, 2, -3)))
    assert [length for length in range(len(record) + 1) if check(record[:length])] == [len(record)]


# ------------------------------------------------------------------------------------------ single layouts

LAYOUTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "as TensorFlow writes": (example(D, S, F), {"d": [*b"abc"], "s": [-7], "f": [1.0, 2.0]}),
    "extra features": (example(entry("x", int64_list(1)), D, entry("y", b""), S, F), {"s": [-7]}),
    "an extra feature that is no Feature": (example(entry("x", b"\xff\xff"), D, S, F), {"s": [-7]}),
    "unpacked": (
        example(D, S, entry("f", unpacked_float_list(3, 4)), entry("v", unpacked_int64_list(5, -6, 7000))),
        {"f": [3.0, 4.0], "v": [5, -6, 7000]},
    ),
    "a non-minimal value": (example(D, F, entry("s", field(0x1A, field(0x0A, varint(5, 4))))), {"s": [5]}),
    "a tenth byte of seven bits": (
        example(D, F, entry("s", field(0x1A, field(0x0A, b"\xff" * 9 + b"\x7e")))),
        {"s": [2**63 - 1]},
    ),
    "non-minimal lengths": (
        field(0x0A, D + F + field(0x0A, field(0x0A, b"s", 1) + field(0x12, int64_list(9), 8), 3), 5),
        {"s": [9]},
    ),
    "the last of two": (example(D, entry("s", int64_list(1)), F, entry("s", int64_list(2))), {"s": [2]}),
    "one of the wrong kind before": (
        example(entry("s", bytes_list(b"x")), D, F, entry("s", int64_list(2))),
        {"s": [2]},
    ),
    "unknown fields": (b"\x10\x05" + example(D) + field(0x12, b"?") + example(S, F) + b"\x1d1234", {"s": [-7]}),
    "the Feature before its name": (
        example(D, F, field(0x0A, field(0x12, int64_list(4)) + field(0x0A, b"s"))),
        {"s": [4]},
    ),
    "an empty Feature": (example(*REQUIRED, entry("v", b"")), {"v": [-1, -1, -1]}),
    "a second packed span, not read": (
        example(D, F, entry("s", field(0x1A, field(0x0A, b"\x05") + field(0x0A, b"\x06")))),
        {"s": [5]},
    ),
    "a second list, not read": (example(D, F, entry("s", int64_list(5) + int64_list(6))), {"s": [5]}),
    "a list of another kind behind, not read": (
        example(D, F, entry("s", int64_list(5) + bytes_list(b""))),
        {"s": [5]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str) -> None:
    record, expected = LAYOUTS[layout]
    assert values_of(record).items() >= expected.items()


# ------------------------------------------------------------------------------------------------- faults

FAULTS: dict[str, tuple[list[bytes], str, str]] = {
    "size": ([entry("d", bytes_list(b"abcd")), S, F], "feature 'd' of 3 bytes", "4 bytes"),
    "no value": ([entry("d", bytes_list()), S, F], "one value in feature 'd'", "0 values"),
    "two values": ([entry("d", bytes_list(b"abc", b"abc")), S, F], "one value in feature 'd'", "2 values"),
    "count": ([D, S, F, entry("v", int64_list(1, 2, 3, 4))], "feature 'v' of 3 values", "4 values"),
    "missing": ([entry("image", bytes_list(b"")), S], "feature 'd'", "features ['image', 's']"),
    "all missing": ([], "feature 'd'", "no features"),
    "many": (
        [entry(f"n{i}", b"") for i in range(20)],
        "feature 'd'",
        f"features {[f'n{i}' for i in range(16)]} and 4 more",
    ),
    "empty": ([D, entry("s", b""), F], "feature 's'", "that feature without a list"),
    "bytes": ([D, S, entry("f", bytes_list(b"x"))], "a float list in feature 'f'", "a bytes list"),
    "unknown kind": ([D, S, F, entry("v", b"\x22\x00")], "a list in feature 'v'", "tag 0x22 at byte 63"),
    "varint": ([field(0x1A, b"")], "a tf.train.Example", "tag 0x1a at byte 2"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case: str) -> None:
    entries, expected, found = FAULTS[case]
    assert fault_of(*entries) == (expected, found)


MALFORMED = {
    "a varint of more than ten bytes at byte 1": b"\x0a" + b"\xff" * 10 + b"\x01",
    "a varint that is cut off at byte 1": b"\x0a" + b"\xff" * 9,
    "a field of 5 bytes where 3 are left at byte 2": b"\x0a\x05abc",
    "a field of 8 bytes where 4 are left at byte 1": b"\x111234",
    "a field of 4 bytes where 3 are left at byte 1": b"\x15123",
    "wire type 3 at byte 0": b"\x13\x14",
    "wire type 7 at byte 2": b"\x10\x05\x17",
    "tag 0x20 in an entry of the features at byte 4": field(0x0A, field(0x0A, b"\x20\x00\x0a\x00")),
    "a third field in an entry of the features at byte 8": field(0x0A, field(0x0A, b"\x0a\x00\x0a\x00\x0a\x00")),
    "a varint that is cut off at byte 7": field(0x0A, field(0x0A, b"\x0a\x01s")),
    "packed floats of 7 bytes at byte 11": example(entry("f", field(0x12, field(0x0A, b"1234567")))),
    "tag 0x08 at byte 11": example(entry("f", field(0x12, b"\x08\x01"))),
}


@pytest.mark.parametrize("found", MALFORMED)
def test_malformed(found: str) -> None:
    fault = parse_example(MALFORMED[found], {"f": SCHEMA.features["f"]})
    assert fault == RecordFault(0, "a tf.train.Example", found, REMEDY_NO_EXAMPLE)


MILLION = 10**6
A_LIST, FEATURES = (
    "at most {} values in feature 'n'",
    "a tf.train.Example of fewer than 1000 features and other fields",
)


@pytest.mark.parametrize(
    ("record", "feature", "expected"),
    [
        pytest.param(example(entry("n", int64_list(*[1] * MILLION))), Int64(), A_LIST, id="varints"),
        pytest.param(example(entry("n", field(0x1A, b"\x08\1" * MILLION))), Int64(), A_LIST, id="unpacked varints"),
        pytest.param(example(entry("n", field(0x12, b"\x0d\0\0\0\0" * MILLION))), Float(), A_LIST, id="floats"),
        pytest.param(example(entry("n", field(0x0A, b"\x0a\0" * MILLION))), Raw("u1"), A_LIST, id="bytes"),
        pytest.param(example(entry("", b"") * MILLION), Int64(default=0), FEATURES, id="features"),
        pytest.param(example() * MILLION, Int64(default=0), FEATURES, id="lists of features"),
        pytest.param(b"\x10\0" * MILLION, Int64(default=0), FEATURES, id="other fields"),
    ],
)
def test_of_what_a_record_has_too_much_little_is_kept(
    record: bytes, feature: Feature, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """Each of them takes a hundred bytes and more while it is parsed."""
    monkeypatch.setattr(loaderd.decode.example, "_MAX_ENTRIES", 1000)
    tracemalloc.start()
    try:
        fault = parse_example(record, {"n": feature})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fault == RecordFault(0, expected.format(1000 + feature.num_bytes), "more") and peak_bytes < 8 << 20


def test_damage_that_tensorflow_overlooks_is_a_fault() -> None:
    """It takes a length that points past the end for one that ends there."""
    record = bytes([0x0A, 0x70]) + b"".join(REQUIRED)
    assert tensorflow_reads(record) is not None
    fault = parse_example(record, SCHEMA.features)
    assert isinstance(fault, RecordFault)
    assert fault.found == f"a field of 112 bytes where {len(record) - 2} are left at byte 2"


# ------------------------------------------------------------------------------------------ where values lie


@settings(suppress_health_check=list(HealthCheck), max_examples=settings.default.max_examples // 3)
@given(messages(), st.integers(0, 2**32 - 1))
def test_pieces_say_where_the_values_lie(record: bytes, seed: int) -> None:
    """Whatever else stands in the pieces and in what is not read: the parse takes the same course."""
    before = parse_example(record, SCHEMA.features)
    if not isinstance(before, Example):
        return
    changed = np.frombuffer(record, np.uint8).copy()
    noise = np.random.default_rng(seed).integers(0, 256, len(record), dtype=np.uint8)
    spans = [(start, stop, 0xFF) for start, stop in before.unread]
    for value in before.values.values():
        spans += [(span.start, span.stop, 0x7F if span.is_varint else 0xFF) for span in value.spans]
    for start, stop, mask in spans:
        changed[start:stop] ^= noise[start:stop] & mask
    after = parse_example(changed.tobytes(), SCHEMA.features)
    assert isinstance(after, Example)
    assert check(changed.tobytes())
    assert after.unread == before.unread
    for name, value in after.values.items():
        assert value.spans == before.values[name].spans
        if not value.spans:
            assert value.data == before.values[name].data
        elif not value.spans[0].is_varint:
            assert value.data == b"".join(changed[span.start : span.stop].tobytes() for span in value.spans)
        assert all(span.stop - span.start <= 10 for span in value.spans if span.is_varint)


def test_all_features_are_listed_as_tensorflow_wrote_them():
    feature, examples = tf.train.Feature, tf.train.Example
    written = examples(
        features=tf.train.Features(
            feature={
                "two": feature(bytes_list=tf.train.BytesList(value=[b"a", b""])),
                "é": feature(float_list=tf.train.FloatList(value=[0.5, -2.0])),
                "big": feature(int64_list=tf.train.Int64List(value=[-1, 2**63 - 1])),
                "none": feature(int64_list=tf.train.Int64List()),
                "nothing": feature(),
            }
        )
    )
    listed = list_features(written.SerializeToString())
    assert isinstance(listed, dict)
    assert {name: (each.kind, each.values) for name, each in listed.items()} == {
        "two": ("bytes", (b"a", b"")),
        "é": ("float", (0.5, -2.0)),
        "big": ("int64", (-1, 2**63 - 1)),
        "none": ("int64", ()),
    }


def test_whatever_is_listed_nothing_is_raised():
    random = np.random.default_rng(0)
    found = [list_features(mutations(example(*REQUIRED), random)) for _ in range(3000)]
    assert {type(each) for each in found} == {dict, RecordFault}
