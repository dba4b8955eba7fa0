"""Writes serialized ``tf.train.Example`` messages; no other module does. ``decode.example`` draws the grammar.

Examples are written from rows (``Schema.row_dtype``), many at a time. The bytes in front of a feature's values are
the same for all records, except for an ``Int64``, whose numbers take one to ten bytes each, and for lists of any
length. So consecutive features of fixed length are written as one matrix, (records, bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema import Feature, Int64, Length

Rows = npt.NDArray[np.void]

_LIST_FIELD = {"bytes": 1, "float": 2, "int64": 3}  # the field of a Feature message that holds this kind of list


def encode_examples(rows: Rows, features: Mapping[str, Feature]) -> Iterator[bytes]:
    """Yield the serialized Example of each of ``rows``, (n,), whose dtype has a member for each of ``features``.

    Of a list, as many values are written as its ``Length`` says; without one, all for which there is room. Pass a few
    MB of rows at a time, so that the copies stay in the cache. Costs 4 µs for a chess record.
    """
    lengths = {each.feature: rows[name].tolist() for name, each in features.items() if isinstance(each, Length)}
    stored = {name: feature for name, feature in features.items() if not isinstance(feature, Length)}
    columns = []
    for varies, group in groupby(stored.items(), key=lambda item: _varies(item[1]) or item[0] in lengths):
        if varies:
            columns += [_entries(name, feature, rows[name], lengths.get(name)) for name, feature in group]
        else:
            columns.append(_fixed_entries(rows, list(group)))
    for entries in zip(*columns, strict=True):
        yield _field(1, b"".join(entries))


def _varies(feature: Feature) -> bool:
    """Whether it takes more bytes in some records than in others, whatever its length is."""
    return isinstance(feature, Int64) or feature.as_list


def _fixed_entries(rows: Rows, features: list[tuple[str, Feature]]) -> Iterator[bytes]:
    """For each record, the entries of these features of fixed length, joined."""
    parts: list[npt.NDArray[np.uint8]] = []
    for name, feature in features:
        values = np.ascontiguousarray(rows[name]).reshape(len(rows), -1).view(np.uint8)
        head = np.frombuffer(_head_of_entry(name, feature.wire_kind, feature.num_bytes), dtype=np.uint8)
        parts += [np.broadcast_to(head, (len(rows), len(head))), values]
    matrix = np.concatenate(parts, axis=1)
    size, data = matrix.shape[1], matrix.tobytes()
    return (data[start : start + size] for start in range(0, len(data), size))


def _entries(name: str, feature: Feature, values: npt.NDArray[Any], lengths: list[int] | None) -> Iterator[bytes]:
    """For each record, the entry of a feature of which it has so many values."""
    kind = feature.wire_kind
    if lengths is None:
        lengths = [feature.num_bytes // feature.length_bytes] * len(values)
    if isinstance(feature, Int64):
        for numbers, length in zip(values.reshape(len(values), -1).tolist(), lengths, strict=True):
            data = b"".join(map(_varint, numbers[:length]))
            yield _head_of_entry(name, kind, len(data)) + data
        return
    size, is_text = feature.length_bytes, values.dtype.kind == "S"
    whole = np.ascontiguousarray(values).tobytes()
    for start, length in zip(range(0, len(whole), feature.num_bytes), lengths, strict=True):
        if feature.as_list:
            items = (whole[at : at + size] for at in range(start, start + size * length, size))
            data = b"".join(_field(1, item.rstrip(b"\0") if is_text else item) for item in items)
            yield _head_of_entry(name, kind, len(data), is_list=True) + data
        else:
            data = whole[start : start + size * length]
            yield _head_of_entry(name, kind, len(data)) + data


@lru_cache(maxsize=4096)
def _head_of_entry(name: str, wire_kind: str, num_bytes: int, is_list: bool = False) -> bytes:
    """The bytes in front of a feature's values, which take ``num_bytes``, in its entry of the map of features.

    ``is_list``: whether these have several bytes values, each with its own head.
    """
    head = b"" if is_list else _head(1, num_bytes)  # bytes, or a packed list
    head = _head(_LIST_FIELD[wire_kind], len(head) + num_bytes) + head
    head = _head(2, len(head) + num_bytes) + head  # the value of the entry, behind its key
    head = _field(1, name.encode()) + head
    return _head(1, len(head) + num_bytes) + head


def _field(number: int, data: bytes) -> bytes:
    return _head(number, len(data)) + data


def _head(number: int, num_bytes: int) -> bytes:
    """The tag of a length-delimited field, and its length."""
    return bytes([number << 3 | 2]) + _varint(num_bytes)


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
