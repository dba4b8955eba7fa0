"""Rows of given values, and what the workers make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.decode.fixed_rows import FixedParser
from loaderd.schema import Schema

AnyArray = npt.NDArray[Any]
Rows = npt.NDArray[np.uint8]


def rows_of(schema: Schema, **features: Any) -> Rows:
    """Rows, (n, row_bytes), that hold these values, (n, …) each."""
    rows = np.zeros(len(next(iter(features.values()))), schema.row_dtype)
    for name, values in features.items():
        rows[name] = values
    return rows.view(np.uint8).reshape(len(rows), schema.row_bytes)


def rows_of_records(schema: Schema, *records: bytes) -> Rows:
    """Rows of records of fixed size, (n, row_bytes): each alone, or many of one size in a row."""
    assert schema.records is not None
    size = schema.records.record_bytes
    records = (
        records if len(records) > 1 else tuple(records[0][at : at + size] for at in range(0, len(records[0]), size))
    )
    lengths = np.array([len(record) for record in records], np.int64)
    rows = np.zeros((len(records), schema.row_bytes), np.uint8)
    buffer = np.frombuffer(b"".join(records), np.uint8)
    assert not FixedParser(schema).parse(buffer, np.cumsum(lengths) - lengths, lengths, rows, np.arange(len(records)))
    return rows


def random_rows(schema: Schema, count: int) -> Rows:
    """Rows, (count, row_bytes), of any bytes; but labels are digits, as others fit no int32."""
    rows = np.random.default_rng(0).integers(0, 256, (count, schema.row_bytes), np.uint8)
    if "label" in schema.features:
        rows.view(schema.row_dtype)["label"] %= 10
    return rows


def decoded(schema: Schema, rows: Rows) -> dict[str, AnyArray]:
    """The fields of ``rows``; in memory between other memory, which the decoder must leave alone."""
    out, around = {}, []
    for name, spec in schema.specs.items():
        size = len(rows) * spec.record_bytes
        buffer = np.full(64 + size + 64, 0xA5, np.uint8)
        around += [buffer[:64], buffer[64 + size :]]
        out[name] = buffer[64 : 64 + size].view(spec.dtype).reshape(len(rows), *spec.shape)
    BatchDecoder(schema).decode(rows, out)
    assert all((guard == 0xA5).all() for guard in around)
    return out
