"""tf.train.Example messages made byte by byte, usual and unusual ones, and what TensorFlow reads from them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from loaderd.schema import Array, Feature, Float, Int64, Packed, PackedBits, Raw, Schema
from tests.helpers.guarded import guarded
from tests.helpers.record_bytes import field, varint

SCHEMA = Schema(
    {
        "d": PackedBits(20),
        "s": Int64(),
        "f": Float((2,)),
        "r": Raw("<u2", (2,), default=(258, 772)),
        "v": Int64((3,), default=-1),
        "é": Float((), default=0.5),
    },
    {"d": Packed("d"), "s": Array("s")},
)
PADDED = Schema(
    {
        "d": Raw("S6", pad=True),
        "s": Int64((2, 2), pad=-1),
        "f": Float((3,), pad=float("nan")),
        "r": Raw("<u2", (3,), default=(258, 772, 5), pad=7),
        "v": Int64(default=-1, pad=9),
        "é": Raw("U2", pad=True, default="é"),
    },
    {"d": Array("d")},
)
"""The same names, with room for values of several lengths."""
EXTRA_NAMES = ["", "x", "comment"]

# ------------------------------------------------------------------------------------------ wire format


def bytes_list(*values: bytes) -> bytes:
    return field(0x0A, b"".join(field(0x0A, value) for value in values))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def float_list(*values: float) -> bytes:
    return field(0x12, field(0x0A, floats(*values)))


def unpacked_float_list(*values: float) -> bytes:
    return field(0x12, b"".join(b"\x0d" + floats(value) for value in values))


def int64_list(*values: int) -> bytes:
    return field(0x1A, field(0x0A, b"".join(map(varint, values))))


def unpacked_int64_list(*values: int) -> bytes:
    return field(0x1A, b"".join(b"\x08" + varint(value) for value in values))


def entry(name: str, feature: bytes) -> bytes:
    return field(0x0A, field(0x0A, name.encode()) + field(0x12, feature))


def example(*entries: bytes) -> bytes:
    return field(0x0A, b"".join(entries))


# What SCHEMA asks for and has no default for.
REQUIRED = [entry("d", bytes_list(b"abc")), entry("s", int64_list(-7)), entry("f", float_list(1.0, 2.0))]

# ------------------------------------------------------------------------------------------- TensorFlow


def tensorflow_spec(schema: Schema) -> dict[str, Any]:
    def spec(feature: Feature) -> Any:
        default = feature.default_bytes
        if not isinstance(feature, Int64 | Float):
            return tf.io.FixedLenFeature([], tf.string, default)
        values = None if default is None else np.frombuffer(default, feature.value_dtype).reshape(feature.shape)
        return tf.io.FixedLenFeature(feature.shape, tf.as_dtype(feature.value_dtype), values)

    return {name: spec(feature) for name, feature in schema.features.items()}


class TensorFlowParser:
    """``tf.io.parse_example`` for one record. ``filler``: a record that it reads."""

    def __init__(self, schema: Schema, filler: bytes) -> None:
        self._schema = schema
        self._filler = filler
        spec = tensorflow_spec(schema)
        signature = [tf.TensorSpec([None], tf.string)]
        self._parse = tf.function(lambda records: tf.io.parse_example(records, spec), input_signature=signature)

    def __call__(self, record: bytes) -> dict[str, bytes] | None:
        """The bytes of each feature's row; None if TensorFlow refuses the record or a bytes value has another size.

        TensorFlow 2.21 writes unpacked floats into its tensor without asking how many there is room for, and a list
        of too many corrupts the heap. Fillers behind the record give it room.
        """
        try:
            parsed = self._parse(tf.constant([record] + [self._filler] * (len(record) // 5 + 1)))
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError):  # the message quotes the record, as UTF-8
            return None
        values: dict[str, bytes] = {}
        for name, feature in self._schema.features.items():
            value = parsed[name][0].numpy()
            values[name] = value if isinstance(value, bytes) else value.tobytes()
            if len(values[name]) != feature.num_bytes:
                return None
        return values


def is_valid_protobuf(record: bytes) -> bool:
    try:
        tf.train.Example.FromString(record)
    except Exception:  # DecodeError; the class depends on protobuf's implementation
        return False
    return True


# ------------------------------------------------------------------------------------------- strategies


def _lengths(payload: bytes, tag: int) -> st.SearchStrategy[bytes]:
    """The payload behind a length that is now and then longer than it need be."""
    return st.sampled_from([0] * 12 + [1, 4, 0]).map(lambda padding: field(tag, payload, padding))


def varints() -> st.SearchStrategy[bytes]:
    values = st.integers(0, 300) | st.integers(-(2**63), 2**63 - 1)
    ten_bytes = st.binary(min_size=9, max_size=9).map(lambda low: bytes(byte | 0x80 for byte in low))
    return (
        values.map(varint)
        | st.builds(varint, st.integers(0, 300), st.integers(0, 8))
        | st.builds(lambda low, last: low + bytes([last]), ten_bytes, st.integers(0, 0x7F))
    )


# Hypothesis prefers the first of several choices: the usual ones stand in front, many times.


def _seldom(*unusual: str, one_in: int) -> st.SearchStrategy[str]:
    """ "usual", or now and then one of the unusual choices."""
    return st.sampled_from(["usual"] * (one_in * len(unusual)) + list(unusual) + ["usual"])


@st.composite
def _feature_messages(draw: st.DrawFn, feature: Feature) -> bytes:
    kind = draw(_seldom("bytes", "float", "int64", one_in=30))
    kind = feature.wire_kind if kind == "usual" else kind
    count = feature.num_values if isinstance(feature, Int64 | Float) else 1
    may_be_short = not isinstance(feature, PackedBits) and feature.pad is not None
    if may_be_short and isinstance(feature, Int64 | Float):
        count = draw(st.integers(0, count))
    count += {"usual": 0, "more": 1, "fewer": -min(1, count)}[draw(_seldom("more", "fewer", one_in=40))]
    packed = draw(st.booleans())
    if kind == "bytes":
        size = feature.num_bytes + {"usual": 0, "other": 1}[draw(_seldom("other", one_in=60))]
        least = 0 if may_be_short else size
        items = [field(0x0A, draw(st.binary(min_size=least, max_size=size))) for _ in range(count)]
        tag, values, another = 0x0A, b"".join(items), field(0x0A, b"x")
    else:
        tag, item_tag, strategy = (
            (0x12, b"\x0d", st.binary(min_size=4, max_size=4)) if kind == "float" else (0x1A, b"\x08", varints())
        )
        items = [draw(strategy) for _ in range(count)]
        values = field(0x0A, b"".join(items)) if packed else b"".join(item_tag + item for item in items)
        another = field(0x0A, items[0]) if items and draw(st.booleans()) else item_tag + bytes(4)
    behind = draw(_seldom("another", "garbage", one_in=20))
    message = draw(_lengths(values + {"usual": b"", "another": another, "garbage": b"\xff"}[behind], tag))
    shapes = {
        "usual": message,
        "empty": b"",
        "unknown": b"\x20\x05",
        "twice": message * 2,
        "garbage behind": message + b"\xff",
        "another kind behind": message + bytes_list(b"?"),
        "unknown before": b"\x20\x05" + message,
    }
    return shapes[draw(_seldom(*list(shapes)[1:], one_in=10))]


@st.composite
def _entries(draw: st.DrawFn, name: str, schema: Schema) -> bytes:
    if name in schema.features:
        message = draw(_feature_messages(schema.features[name]))
    else:
        message = draw(st.just(bytes_list(b"comment")) | st.binary(max_size=6))
    key, value = field(0x0A, name.encode()), draw(_lengths(message, 0x12))
    shapes = {
        "usual": key + value,
        "value first": value + key,
        "long tag": b"\x8a\0" + key[1:] + value,
        "key": key,
        "two keys": key + key,
        "two values": value + value,
        "three fields": key + value + b"\x20\x01",
    }
    return draw(_lengths(shapes[draw(_seldom(*list(shapes)[1:], one_in=20))], 0x0A))


UNKNOWN_FIELDS = [
    b"\x10\x05",
    b"\x19" + bytes(8),
    b"\x13\x14",
    field(0x12, b"?"),
    b"\x8a\0\x02ab",
    b"\x1d" + bytes(4),
]


@st.composite
def messages(draw: st.DrawFn, schema: Schema = SCHEMA) -> bytes:
    """Messages that are mostly Examples of ``schema`` (SCHEMA or PADDED), in many layouts; some are not."""
    names = ["d", "s", "f", *draw(st.lists(st.sampled_from(["r", "v", "é", *EXTRA_NAMES]), max_size=4, unique=True))]
    change = draw(_seldom("twice", "left out", one_in=8))
    if change != "usual":
        name = draw(st.sampled_from(names))
        names = [*names, name] if change == "twice" else [other for other in names if other != name]
    entries = [draw(_entries(name, schema)) for name in draw(st.permutations(names))]
    cut = draw(st.integers(0, len(entries)))
    parts = [draw(_lengths(b"".join(part), 0x0A)) for part in (entries[:cut], entries[cut:]) if part]
    if draw(_seldom("unknown field", one_in=4)) != "usual":
        parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from(UNKNOWN_FIELDS)))
    return b"".join(parts)


def mutations(record: bytes, random: np.random.Generator) -> bytes:
    """The record with a few bytes or bits changed, left out, put in or cut off."""
    data = bytearray(record)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(0, len(data) + 1))
        kind = random.integers(0, 6)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + int(random.integers(1, 4))]
        elif kind == 2:
            data[at:at] = random.bytes(int(random.integers(1, 4)))
        elif kind == 3 and at < len(data):
            data[at] ^= 1 << int(random.integers(0, 8))
        elif at < len(data):
            data[at] = int(random.choice([0, 1, 8, 0x0A, 0x0D, 0x12, 0x1A, 0x7F, 0x80, 0xFF, *random.bytes(3)]))
    return bytes(data)


def concatenated(records: Iterable[bytes], gap: int = 16) -> tuple[Any, Any, Any]:
    """Buffer (uint8), starts and lengths (int64, (n,)) of records that lie ``gap`` bytes apart, as in a shard.

    Behind the last one, nothing may be read.
    """
    parts = list(records)
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    starts = gap + np.cumsum(lengths + gap) - (lengths + gap)
    return guarded(b"".join(b"\xaa" * gap + part for part in parts)), starts, lengths
