"""Writes serialized ``tf.train.Example`` messages; no other module does. ``decode.example`` draws the grammar.

Examples are written from rows (``Schema.row_dtype``), many at a time. The bytes in front of a feature's values are
the same for all records, except for an ``Int64``, whose numbers take one to ten bytes each. So consecutive features
of fixed length are written as one matrix, (records, bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema import Feature, Int64

Rows = npt.NDArray[np.void]

_LIST_FIELD = {"bytes": 1, "float": 2, "int64": 3}  # the field of a Feature message that holds this kind of list


def encode_examples(rows: Rows, features: Mapping[str, Feature]) -> Iterator[bytes]:
    """Yield the serialized Example of each of ``rows``, (n,), whose dtype has a member for each of ``features``.

    Pass a few MB of rows at a time, so that the copies stay in the cache. Costs 4 µs for a chess record.
    """
    columns = []
    for is_number, group in groupby(features.items(), key=lambda item: isinstance(item[1], Int64)):
        if is_number:
            columns += [_number_entries(name, rows[name]) for name, _ in group]
        else:
            columns.append(_fixed_entries(rows, list(group)))
    for entries in zip(*columns, strict=True):
        yield _field(1, b"".join(entries))


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


def _number_entries(name: str, values: npt.NDArray[Any]) -> Iterator[bytes]:
    """For each record, the entry of an Int64 feature."""
    for numbers in values.reshape(len(values), -1).tolist():
        data = b"".join(map(_varint, numbers))
        yield _head_of_entry(name, Int64.wire_kind, len(data)) + data


@lru_cache(maxsize=4096)
def _head_of_entry(name: str, wire_kind: str, num_bytes: int) -> bytes:
    """The bytes in front of a feature's values, which take ``num_bytes``, in its entry of the map of features."""
    head = _head(1, num_bytes)  # bytes, or a packed list
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
