"""Records decoded as plainly as can be: what every candidate must deliver.

Written from the descriptions of the record and of the fields, not from any candidate's code, so that candidates can
be checked against it. :data:`CHANNEL_ORDER` and the three values are for candidates that are written for chess only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd import Array, Bits, Derived, Fill, Int64, PackedBits, Planes, Schema, Spread, schemas
from loaderd.decode.example import RecordFault, parse_example
from loaderd.errors import Damage
from loaderd.formats.compression import detect_compression, open_stream
from loaderd.formats.framing import scan
from loaderd.schema import Field
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import ShardFile

VALUE_A, VALUE_K, VALUE_B = 0.8, 600.0, 50.0

CHANNEL_ORDER = np.array([channel for member in range(4) for channel in range(member, 24, 4)])
CHANNEL_SIGN = np.repeat(np.array([1.0, -1.0, 1.0, -1.0], np.float32), 6)

Arrays = dict[str, npt.NDArray[Any]]


def chess(dtype: str = "float32") -> Schema:
    """The schema of the synthetic shards, as every candidate decodes them."""
    return schemas.chess_eval(value_a=VALUE_A, value_k=VALUE_K, value_b=VALUE_B, dtype=dtype)


def bits(record_size: int, dtype: str = "float32") -> Schema:
    """The schema of synthetic shards without chess: ``bits`` (8 record_size,) of ``dtype``, ``score`` () float32."""
    return Schema(
        features={"d": PackedBits(8 * record_size), "s": Int64()},
        fields={"bits": Bits("d", shape=(8 * record_size,), dtype=dtype), "score": Array("s", dtype="float32")},
    )


def decode_chess(stored: npt.NDArray[np.uint8], scores: npt.NDArray[np.int64], dtype: str = "float32") -> Arrays:
    """``board`` (n, 8, 8, 24), ``flags`` (n, 10), ``score`` (n,) of ``stored`` uint8 (n, 194), ``scores`` int64 (n,).

    Board and flags are of ``dtype``. The score is computed in float64 and rounded to float32 once, so that it has
    one right value: A·tanh(s / K), or sign(s)·(A + (1 - A) / (B - 1) · max(0, B - \\|s\\|)) where it counts moves to
    mate.
    """
    bits = np.unpackbits(stored, axis=1)
    board = bits[:, :1536].reshape(-1, 8, 8, 24)[..., CHANNEL_ORDER] * CHANNEL_SIGN
    size = np.abs(scores.astype(np.float64))
    decided = VALUE_A + (1.0 - VALUE_A) / (VALUE_B - 1.0) * np.maximum(0.0, VALUE_B - size)
    score = np.where(bits[:, 1546] == 1, np.sign(scores) * decided, VALUE_A * np.tanh(scores / VALUE_K))
    return {
        "board": board.astype(dtype),
        "flags": bits[:, 1536:1546].astype(dtype),
        "score": score.astype(np.float32),
    }


def decode(schema: Schema, stored: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The fields of ``schema`` from its stored features, (n, …) each; packed bits are uint8, (n, num_bytes)."""
    found: Arrays = {}
    for name in schema.evaluation_order:
        field = schema.definition_of(name)
        values = _decode_field(field, schema, stored, found)
        spec = schema.spec_of(name)
        found[name] = values.astype(spec.dtype).reshape(-1, *spec.shape)
    return {name: found[name] for name in schema.fields}


def _decode_field(
    field: Field, schema: Schema, stored: Mapping[str, npt.NDArray[Any]], made: Arrays
) -> npt.NDArray[Any]:
    """The values of a field: (n, …), or (1, …) of a Fill; ``decode`` gives them their shape. ``made``: its inputs."""
    if isinstance(field, Derived):
        return np.asarray(field.function(*(made[source] for source in field.inputs))).astype(field.dtype)
    if isinstance(field, Planes):
        num_records = len(next(iter(stored.values())))
        parts = [_decode_field(part, schema, stored, made) for part in field.parts]
        return np.concatenate([part.reshape(len(part), -1).repeat(num_records // len(part), 0) for part in parts], 1)
    if isinstance(field, Fill):
        return np.full((1, *field.shape), field.value, field.dtype)
    assert isinstance(field, (Bits, Array, Spread)), "a field of the schemas of benchmarks"
    values = stored[field.feature]
    if isinstance(field, Bits):
        if field.plane_bytes is not None:
            planes = values[:, field.start // 8 :][:, : field.shape[0] * field.plane_bytes]
            values = planes.reshape(len(values), field.shape[0], field.plane_bytes)
        bits = np.unpackbits(values, axis=-1, bitorder="big" if field.bit_order == "big" else "little")
        first, count = (field.start, field.num_bits) if field.plane_bytes is None else (0, field.plane_bits)
        bits = bits[..., first : first + count]
        ordered = bits.reshape(len(bits), -1, field.num_channels)[..., field.order]
        return np.where(ordered == 1, field.channel_scale.astype(field.dtype), np.zeros((), field.dtype))
    if isinstance(field, Spread):
        if isinstance(schema.features[field.feature], PackedBits):
            values = np.unpackbits(values, axis=-1, bitorder="big" if field.bit_order == "big" else "little")
        values = values.reshape(len(values), -1, 1)
        values = values if field.first is None else values[:, field.first :][:, :1]
        is_whole = field.scale.is_integer() and values.dtype.kind in "iu" and field.dtype.kind in "iu"
        scaled = values.astype(np.int64) * int(field.scale) if is_whole else values.astype(np.float64) * field.scale
        return np.repeat(scaled.astype(field.dtype), math.prod(field.shape), axis=-1)
    if isinstance(field, Array):
        if field.first is not None:
            values = values.reshape(len(values), -1)[:, field.first :][:, : math.prod(field.shape or ())]
        values = values.astype(field.dtype or values.dtype)
        values = values if field.scale is None else values * values.dtype.type(field.scale)
        values = values if field.offset is None else values + values.dtype.type(field.offset)
    return values


def read(file: ShardFile) -> Iterator[bytes]:
    """The records of a shard, as they are stored. Raises ValueError where one is damaged."""
    with closing(open_shard(file)) as opened:
        compression = detect_compression(file.uri, opened.read_at, file.size_bytes)
        stream = open_stream(file.uri, opened.read_at, compression)
        for found in scan(file.uri, stream.read_into):
            if isinstance(found, Damage):
                raise ValueError(str(found))
            for start, length in zip(found.payload_starts.tolist(), found.payload_lengths.tolist(), strict=True):
                yield found.buffer[start : start + length].tobytes()
        if stream.damage is not None:
            raise ValueError(str(stream.damage))


def parse(schema: Schema, records: Iterable[bytes]) -> Arrays:
    """The stored features of ``schema`` in ``records``, which are n serialized Examples: (n, …) each.

    Raises ValueError for a record that is not what the schema says.
    """
    values: dict[str, bytearray] = {name: bytearray() for name in schema.features}
    for number, record in enumerate(records):
        example = parse_example(record, schema.features)
        if isinstance(example, RecordFault):
            raise ValueError(f"record {number}: expected {example.expected}, found {example.found}")
        for name, value in example.values.items():
            values[name] += value.data
    dtypes = {name: feature.row_dtype for name, feature in schema.features.items()}
    return {name: np.frombuffer(values[name], row.base).reshape(-1, *row.shape) for name, row in dtypes.items()}
