"""Serialized ``tf.train.Example``: the one place that writes them; the grammar is drawn in ``decode.example``.

Examples are written from rows (``Schema.row_dtype``), many at a time. What a feature's entry begins with is the same
for all records, unless it is an ``Int64``, whose numbers take one to ten bytes each. So neighbouring entries of fixed
length are written as one matrix, (records, bytes).
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

_LIST_FIELD = {"bytes": 1, "float": 2, "int64": 3}  # of a Feature


def encode_examples(rows: Rows, features: Mapping[str, Feature]) -> Iterator[bytes]:
    """The Example of each of ``rows``, (n,), whose dtype has a member for each of ``features``, in that order.

    A generator: rows of some MB at a time keep the copies in the cache. Costs 4 µs for a chess record.
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
    """The entries of features of fixed length, of each record."""
    parts: list[npt.NDArray[np.uint8]] = []
    for name, feature in features:
        values = np.ascontiguousarray(rows[name]).reshape(len(rows), -1).view(np.uint8)
        head = np.frombuffer(_head_of_entry(name, feature, feature.num_bytes), dtype=np.uint8)
        parts += [np.broadcast_to(head, (len(rows), len(head))), values]
    matrix = np.concatenate(parts, axis=1)
    size, data = matrix.shape[1], matrix.tobytes()
    return (data[start : start + size] for start in range(0, len(data), size))


def _number_entries(name: str, values: npt.NDArray[Any]) -> Iterator[bytes]:
    """The entries of an Int64 feature, of each record."""
    for numbers in values.reshape(len(values), -1).tolist():
        data = b"".join(map(_varint, numbers))
        yield _head_of_entry(name, Int64(), len(data)) + data


@lru_cache(maxsize=4096)
def _head_of_entry(name: str, feature: Feature, num_bytes: int) -> bytes:
    """What stands in front of the ``num_bytes`` of a feature's values, in its entry of the map."""
    head = _head(1, num_bytes)  # bytes, or a packed list
    head = _head(_LIST_FIELD[feature.wire_kind], len(head) + num_bytes) + head
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
