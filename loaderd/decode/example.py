"""The plain parser of a ``tf.train.Example``: one record, one byte after the other.

The grammar, each ``n`` being a varint that counts the bytes behind it::

    Example    ( 0x0a n Features  |  any other field, skipped )*        (a SequenceExample: 0x12 n feature_lists)
    Features   ( 0x0a n Entry )*
    Entry      ( 0x0a n name  |  0x12 n Feature ), two of them
    Feature    ( 0x0a n BytesList  |  0x12 n FloatList  |  0x1a n Int64List ), then anything  |  nothing
    BytesList  ( 0x0a n bytes )*
    FloatList  ( 0x0d float32 )*  |  0x0a n float32*, then anything
    Int64List  ( 0x08 varint )*   |  0x0a n varint*, then anything

It is TensorFlow's (tensorflow/core/util/example_proto_fast_parsing.cc), which reads less than protobuf would: of a
packed list its first part, of a feature its first list, and nothing of a feature that is not asked for. Of several
features with the same name, the last that is not empty counts. What this parser reads, TensorFlow reads alike. What
only TensorFlow reads is damaged (a length that points past the end of what contains it, say), and is a fault here.

Besides the values, the parser says where they lie: from that :mod:`loaderd.decode.example_rows` learns layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from loaderd.schema import Feature, Length, PackedBits, Raw

_DELIMITED_1 = 0x0A  # field 1, length-delimited: Example.features, Features.feature, the name of an entry, packed
_DELIMITED_2 = 0x12  # field 2, length-delimited: the Feature of an entry
_VARINT_1 = 0x08  # an unpacked int64
_FIXED32_1 = 0x0D  # an unpacked float

_LIST_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_LIST_TEXTS = {0x0A: "a bytes list", 0x12: "a float list", 0x1A: "an int64 list"}
_MAX_VARINT_BYTES = 10
_UINT64 = (1 << 64) - 1
_MAX_NAMES = 16
_REMEDY = "Change the schema to what the records hold. loaderd inspect SHARDS --features proposes one."
REMEDY_NO_EXAMPLE = (
    "CRCs are right, so this is what was written. If your records are no tf.train.Example, but all have one size, "
    "write them one behind the other into plain files, and read these with loaderd.FixedRecords: "
    "for record in tf.data.TFRecordDataset(path): file.write(record.numpy())."
)
_REMEDY_MISSING = "Change the schema to what the records hold, or give the feature a default."
_REMEDY_LENGTH = (
    "Change the schema to what the records hold. If lengths differ, give the feature room for the longest and a pad, "
    'such as Int64((64,), pad=-1) or Raw("S16", pad=True); with cut=True, longer ones are cut.'
)
_REMEDY_VALUES = (
    "Change the schema to what the records hold. A list of bytes values is read with as_list, such as "
    'Raw("S16", (8,), pad=True, as_list=True).'
)
_REMEDY_LISTS = (
    "Of a tf.train.SequenceExample, only the context is read. Write each step as a tf.train.Example of its own, or "
    "the list as one feature: Int64((64,), pad=-1) pads lists that are shorter."
)
# Both take a hundred times their bytes while they are parsed, and a record may have gigabytes of either.
_MAX_ENTRIES = 1 << 16
_MAX_MORE_VALUES = 1000  # than a feature has: they are counted, and named


class RecordFault(NamedTuple):
    """What is wrong with one record of a batch. ``record``: its position in the batch, from 0.

    ``remedy``: what to do, if the record is as it should be.
    """

    record: int
    expected: str
    found: str
    remedy: str = _REMEDY


class Span(NamedTuple):
    """``record[start:stop]``: raw bytes of a value (a bytes value, some floats), or one varint."""

    start: int
    stop: int
    is_varint: bool


class Value(NamedTuple):
    """A stored feature of one record.

    ``data``: its bytes in the row. ``spans``: where they come from, in order; none if the default stands in. What
    ``data`` has behind the bytes of all spans is padding, but for a list of bytes values, each of which is padded.
    ``length``: how many values the record holds, as :class:`loaderd.Length` counts them.
    """

    data: bytes
    spans: tuple[Span, ...]
    length: int = 0


class Example(NamedTuple):
    """A parsed record: the value of each stored feature by name, in the schema's order.

    ``unread``: stretches (start, stop) whose bytes make no difference to the parser.
    """

    values: dict[str, Value]
    unread: tuple[tuple[int, int], ...]


class _Mismatch(Exception):
    """The record is not what it should be; the arguments are those of RecordFault behind its first."""


def parse_example(
    record: bytes | memoryview, features: Mapping[str, Feature], position: int = 0
) -> Example | RecordFault:
    """The stored ``features`` of a serialized ``tf.train.Example``, or what is wrong with it.

    ``position``: what :attr:`RecordFault.record` is to be. Nothing is raised, whatever the record holds.
    Costs 15 µs for a record of two features.
    """
    record = bytes(record)
    wanted = {name.encode(): name for name, feature in features.items() if not isinstance(feature, Length)}
    places: dict[str, tuple[int, int]] = {}
    names: list[bytes] = []
    unread: list[tuple[int, int]] = []
    try:
        for name, start, stop in _entries(record):
            names.append(name)
            if name not in wanted:
                unread.append((start, stop))
            elif start < stop:
                if record[start] not in _LIST_TEXTS:
                    raise _Mismatch(
                        f"a list in feature {wanted[name]!r}", f"tag {record[start]:#04x} at byte {start}"
                    )
                places[wanted[name]] = start, stop
        values = {
            name: _value(record, name, feature, *places[name])
            if name in places
            else _default(record, name, feature, names)
            for name, feature in features.items()
            if not isinstance(feature, Length)
        }
    except _Mismatch as mismatch:
        return RecordFault(position, *mismatch.args)
    for each, feature in features.items():
        if isinstance(feature, Length):
            values[each] = Value(values[feature.feature].length.to_bytes(4, "little"), ())
    return Example(values, tuple(unread))


class Listed(NamedTuple):
    """What a record holds under one name: ``kind``: "bytes", "float" or "int64"; ``values``: all of them."""

    kind: str
    values: tuple[bytes | float | int, ...]


def list_features(record: bytes) -> dict[str, Listed] | RecordFault:
    """All features of a serialized ``tf.train.Example`` that have a list, or what is wrong with it; without a schema.

    For people to look at: a name that is no UTF-8 is shown with backslashes. Nothing is raised.
    """
    kinds = {tag: kind for kind, tag in _LIST_TAGS.items()}
    features = {}
    try:
        for name, start, stop in _entries(record):
            if start < stop:
                kind = kinds.get(record[start])
                if kind is None:
                    raise _Mismatch(f"a list in feature {name!r}", f"tag {record[start]:#04x} at byte {start}")
                value = _LIST_READERS[kind](record, *_delimited(record, start + 1, stop), len(record))
                features[name.decode(errors="backslashreplace")] = Listed(kind, _plain(kind, record, value))
    except _Mismatch as mismatch:
        return RecordFault(0, *mismatch.args)
    return features


def feature_lists(record: bytes) -> list[str]:
    """The names of the feature lists of a ``tf.train.SequenceExample``, of which only the context is read.

    None of a ``tf.train.Example``, and of what is neither. A name that is no UTF-8 is shown with backslashes.
    """
    try:
        return [name.decode(errors="backslashreplace") for name, *_ in _entries(record, _DELIMITED_2)]
    except _Mismatch:
        return []


def read_fields(message: bytes, most: int = 16) -> list[tuple[int, int | bytes]] | None:
    """(number, value) of each field of a protobuf message of varints and bytes; None: it is none, or has too many."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at, len(message))
            if tag & 7 not in (0, 2) or len(found) == most:
                return None
            value: int | bytes
            if tag & 7:
                start, at = _delimited(message, at, len(message))
                value = message[start:at]
            else:
                value, at = _varint(message, at, len(message))
            found.append((tag >> 3, value))
    except _Mismatch:
        return None
    return found


def _plain(kind: str, record: bytes, value: Value) -> tuple[bytes | float | int, ...]:
    if kind == "bytes":
        return tuple(record[span.start : span.stop] for span in value.spans)
    return tuple(np.frombuffer(value.data, "<f4" if kind == "float" else "<i8").tolist())


def _entries(record: bytes, field: int = _DELIMITED_1) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and stop of each Feature, in the order of the record; with the ``field`` of lists, of each list."""
    at, end = 0, len(record)
    left = _MAX_ENTRIES
    while at < end and left:
        left -= 1
        if record[at] != field:
            at = _skip(record, at, end)
            continue
        entry, at = _delimited(record, at + 1, end)
        while entry < at and left:
            left -= 1
            _expect_tag(record, entry, (_DELIMITED_1,))
            start, entry = _delimited(record, entry + 1, at)
            yield _entry(record, start, entry)
    if not left:
        raise _Mismatch(f"a tf.train.Example of fewer than {_MAX_ENTRIES} features and other fields", "more")


def _entry(record: bytes, at: int, stop: int) -> tuple[bytes, int, int]:
    name = b""
    feature = (at, at)
    for _ in range(2):
        tag, value = _varint(record, at, stop)
        if tag not in (_DELIMITED_1, _DELIMITED_2):
            raise _malformed(f"tag {tag:#04x} in an entry of the features", at)
        start, at = _delimited(record, value, stop)
        if tag == _DELIMITED_1:
            name = record[start:at]
        else:
            feature = (start, at)
    if at != stop:
        raise _malformed("a third field in an entry of the features", at)
    return name, *feature


def _value(record: bytes, name: str, feature: Feature, start: int, stop: int) -> Value:
    """The value of a feature whose Feature message is ``record[start:stop]``, which is not empty."""
    tag = _LIST_TAGS[feature.wire_kind]
    if record[start] != tag:
        raise _Mismatch(f"{_LIST_TEXTS[tag]} in feature {name!r}", _LIST_TEXTS[record[start]])
    # At least the values that the feature has, for none has more values than bytes.
    most = feature.num_bytes + _MAX_MORE_VALUES
    is_cut = feature.cut and (feature.wire_kind != "bytes" or feature.as_list)
    if is_cut:
        most = (
            feature.num_bytes // feature.length_bytes - 1
        )  # what is behind the values that are kept is not looked at
    value = _LIST_READERS[feature.wire_kind](record, *_delimited(record, start + 1, stop), most)
    if len(value.spans) > most and not is_cut:
        raise _Mismatch(f"at most {most} values in feature {name!r}", "more")
    if isinstance(feature, Raw) and feature.as_list:
        value = _items(record, name, feature, value.spans)
    elif feature.wire_kind == "bytes" and len(value.spans) != 1:
        several = _REMEDY_VALUES if value.spans else _REMEDY
        raise _Mismatch(f"one value in feature {name!r}", _count(len(value.spans), "value"), several)
    data = feature.padded(value.data)
    if data is None:
        raise _wrong_length(name, feature, len(value.data))
    kept = min(len(value.data), feature.num_bytes)
    spans = _shortened(value.spans, kept) if kept < len(value.data) else value.spans
    return Value(data, spans, kept // feature.length_bytes)


def _items(record: bytes, name: str, feature: Raw, spans: tuple[Span, ...]) -> Value:
    """The bytes values of a list, each with its padding."""
    items = []
    for number, span in enumerate(spans):
        item = feature.padded(record[span.start : span.stop], feature.length_bytes)
        if item is None:
            size, found = _count(feature.length_bytes, "byte"), _count(span.stop - span.start, "byte")
            at_most = "" if feature.pad is None else "at most "
            raise _Mismatch(f"value {number} of feature {name!r} of {at_most}{size}", found, _REMEDY_LENGTH)
        items.append(item)
    return Value(b"".join(items), spans)


def _shortened(spans: tuple[Span, ...], num_bytes: int) -> tuple[Span, ...]:
    """The first of ``spans``, of raw bytes, that have ``num_bytes`` together."""
    kept = []
    for span in spans:
        size = min(span.stop - span.start, num_bytes)
        if size:
            kept.append(Span(span.start, span.start + size, False))
        num_bytes -= size
    return tuple(kept)


def _wrong_length(name: str, feature: Feature, num_bytes: int) -> _Mismatch:
    """What is wrong with a stored value of ``num_bytes``, which the feature has no room for."""
    counts_values = feature.wire_kind != "bytes" or feature.as_list
    item_bytes, unit = (feature.length_bytes, "value") if counts_values else (1, "byte")
    length, found = (_count(size // item_bytes, unit) for size in (feature.num_bytes, num_bytes))
    if isinstance(feature, PackedBits):
        return _Mismatch(f"feature {name!r} of {length}", found)
    if feature.pad is None:
        return _Mismatch(f"feature {name!r} of {length}", found, _REMEDY_LENGTH)
    if num_bytes < feature.num_bytes:
        return _Mismatch(f"feature {name!r} of whole values of {feature.value_dtype}", found)
    return _Mismatch(f"feature {name!r} of at most {length}", found, _REMEDY_LENGTH)


def _default(record: bytes, name: str, feature: Feature, names: list[bytes]) -> Value:
    if name in feature_lists(record):
        raise _Mismatch(f"feature {name!r}", f"{name!r} in the record's feature_lists", _REMEDY_LISTS)
    if feature.default_bytes is not None:
        return Value(feature.default_bytes, (), feature.default_length)
    if name.encode() in names:
        raise _Mismatch(f"feature {name!r}", "that feature without a list", _REMEDY_MISSING)
    shown = [each[:64].decode(errors="backslashreplace") for each in names[:_MAX_NAMES]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    if not names:  # nor any other field that is known: it may be another protobuf, such as a serialized tensor
        raise _Mismatch(f"feature {name!r}", "no features", f"{_REMEDY_MISSING} {REMEDY_NO_EXAMPLE}")
    raise _Mismatch(f"feature {name!r}", f"features {shown}{more}", _REMEDY_MISSING)


# ------------------------------------------------------------------------------------------------- lists


def _bytes_list(record: bytes, at: int, stop: int, most: int) -> Value:
    spans = []
    while at < stop:
        _expect_tag(record, at, (_DELIMITED_1,))
        start, at = _delimited(record, at + 1, stop)
        spans.append(Span(start, at, False))
        if len(spans) > most:
            break
    return _joined(record, spans)


def _float_list(record: bytes, at: int, stop: int, most: int) -> Value:
    spans = []
    if at < stop and _expect_tag(record, at, (_DELIMITED_1, _FIXED32_1)) == _DELIMITED_1:
        start, end = _delimited(record, at + 1, stop)
        if (end - start) % 4:
            raise _malformed(f"packed floats of {end - start} bytes", at)
        return _joined(record, [Span(start, end, False)])
    while at < stop:
        _expect_tag(record, at, (_FIXED32_1,))
        start, at = at + 1, _fixed(at + 1, 4, stop)
        spans.append(Span(start, at, False))
        if len(spans) > most:
            break
    return _joined(record, spans)


def _int64_list(record: bytes, at: int, stop: int, most: int) -> Value:
    spans = []
    data = bytearray()
    packed = at < stop and _expect_tag(record, at, (_DELIMITED_1, _VARINT_1)) == _DELIMITED_1
    if packed:
        at, stop = _delimited(record, at + 1, stop)
    while at < stop:
        if not packed:
            _expect_tag(record, at, (_VARINT_1,))
            at += 1
        number, end = _varint(record, at, stop)
        spans.append(Span(at, end, True))
        data += number.to_bytes(8, "little")
        at = end
        if len(spans) > most:
            break
    return Value(bytes(data), tuple(spans))


def _joined(record: bytes, spans: list[Span]) -> Value:
    return Value(b"".join(record[span.start : span.stop] for span in spans), tuple(spans))


_LIST_READERS: dict[str, Callable[[bytes, int, int, int], Value]] = {
    "bytes": _bytes_list,
    "float": _float_list,
    "int64": _int64_list,
}

# ------------------------------------------------------------------------------------------- wire format


def _varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """The varint at ``at`` as an unsigned number of 64 bits, and where it ends (at most at ``stop``).

    As in protobuf, a varint has up to ten bytes, whatever its value, and of the tenth only one bit counts.
    """
    value = shift = 0
    for end in range(at, min(at + _MAX_VARINT_BYTES, stop)):
        byte = record[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, end + 1
        shift += 7
    what = "a varint of more than ten bytes" if at + _MAX_VARINT_BYTES <= stop else "a varint that is cut off"
    raise _malformed(what, at)


def _delimited(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """Start and stop of the bytes that the length at ``at`` announces."""
    length, start = _varint(record, at, stop)
    return start, _fixed(start, length, stop)


def _fixed(at: int, num_bytes: int, stop: int) -> int:
    """Where ``num_bytes`` from ``at`` on end: at most at ``stop``."""
    if num_bytes > stop - at:
        raise _malformed(f"a field of {_count(num_bytes, 'byte')} where {stop - at} are left", at)
    return at + num_bytes


def _skip(record: bytes, at: int, stop: int) -> int:
    """Where the field at ``at`` ends."""
    tag, value = _varint(record, at, stop)
    match tag & 7:
        case 0:
            return _varint(record, value, stop)[1]
        case 1:
            return _fixed(value, 8, stop)
        case 2:
            return _delimited(record, value, stop)[1]
        case 5:
            return _fixed(value, 4, stop)
        case wire_type:
            raise _malformed(f"wire type {wire_type}", at)


def _expect_tag(record: bytes, at: int, tags: tuple[int, ...]) -> int:
    if record[at] not in tags:
        raise _malformed(f"tag {record[at]:#04x}", at)
    return record[at]


def _malformed(what: str, at: int) -> _Mismatch:
    return _Mismatch("a tf.train.Example", f"{what} at byte {at}", REMEDY_NO_EXAMPLE)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
