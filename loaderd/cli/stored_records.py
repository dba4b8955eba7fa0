"""What ``loaderd inspect`` finds in a shard: of which kind its records are, and one of them as it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from loaderd.cli.python_text import as_python, quoted
from loaderd.decode.example import Listed
from loaderd.errors import CorruptRecordError, Damage, OptionError, ShardReadError, at_damage
from loaderd.formats.blocks import BlockReader
from loaderd.formats.detect import columns_of, detect_schema
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.reader import Reader
from loaderd.formats.shard_index import ShardIndex
from loaderd.redaction import readable_line
from loaderd.schema import Feature, FixedRecords, Length, Raw, Schema
from loaderd.schema.schema import with_lengths
from loaderd.storage.shard_file import Block, ShardFile

PADDED = "shorter ones are padded, and cut=True would cut longer ones"
_MANY_BITS = 256
_NO_SCHEMA = "none is known, so these are the columns of the file"


@dataclass(frozen=True)
class StoredFormat:
    """What records of a fixed size are. ``schema``: None for a file of which nothing is known but its columns.

    ``named``: the schema in words. ``python``: the text of a module with the schema, or with one that reads all
    arrays; "" if the user gave the schema. ``left_out``: of columns that cannot be features, why.
    """

    records: FixedRecords
    schema: Schema | None
    named: str
    python: str
    left_out: Mapping[str, str] = field(default_factory=dict)


def stored_of(schema: Schema, name: str) -> StoredFormat | None:
    """The records that ``schema`` describes; None: TFRecord. ``name``: what the user calls the schema."""
    return None if schema.records is None else StoredFormat(schema.records, schema, name, "")


def stored_in(file: ShardFile) -> StoredFormat | None:
    """What the content of a shard shows of its records; None: it is TFRecord, or does not show what it is.

    Raises ShardReadError, SchemaError and StorageError.
    """
    detected = None if file.columns else detect_schema(file)
    if detected is not None:
        schema, made_by = detected
        assert schema.records is not None
        module = f"import loaderd\n\nschema = {made_by}\n"
        return StoredFormat(schema.records, schema, f"{made_by}, recognized by the content", module)
    columns = columns_of(file)
    if columns is None:
        return None
    records, left_out = columns
    if records is None:
        raise ShardReadError(f"{file.uri} has no column that can be a feature: {left_out}")
    return _of_columns(records, left_out)


def _of_columns(records: FixedRecords, left_out: Mapping[str, str]) -> StoredFormat:
    notes = "".join(f"# {name!a} is left out: {readable_line(why)}.\n" for name, why in left_out.items())
    return StoredFormat(records, None, _NO_SCHEMA, _as_python(records) + notes, left_out)


def joined(one: StoredFormat, other: StoredFormat) -> StoredFormat | None:
    """What reads both: the same columns, whose texts and lists are longer in one of them; None: nothing does."""
    if one == other:
        return one
    if one.schema or other.schema or not (one.records.is_of_features and other.records.is_of_features):
        return None
    left_out = {**one.left_out, **other.left_out}
    columns = [
        {name: feature for name, feature in each.records.items() if not isinstance(feature, Length)}
        for each in (one, other)
    ]
    if list(columns[0]) != list(columns[1]):
        return None
    made: dict[str, Feature] = {}
    for name, feature in columns[0].items():
        longer = _longer(feature, columns[1][name])
        if longer is None:
            return None
        made[name] = longer
    return _of_columns(FixedRecords(with_lengths(made)), left_out)


def _longer(one: Feature, other: Feature) -> Feature | None:
    if one == other:
        return one
    if not (isinstance(one, Raw) and isinstance(other, Raw) and one.shape[1:] == other.shape[1:]):
        return None
    is_text, varies = one.is_text and other.is_text, one if one.pad is not None else other
    if not (is_text or one.dtype == other.dtype) or len(one.shape) != len(other.shape):
        return None
    if varies.pad is None and one.shape != other.shape:
        return None
    dtype = max(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    default = one.default if other.default is None else other.default
    default = () if default is not None and varies.pad is not None else default
    return replace(varies, dtype=dtype, shape=max(one.shape, other.shape), default=default)


def read_record(
    file: ShardFile, index: ShardIndex, records: FixedRecords | None, number: int | None
) -> tuple[int, bytes]:
    """(number, bytes) of record ``number``; None: the first healthy one. Raises OptionError if it is not healthy.

    ``records``: None for TFRecord.
    """
    blocks = [Block(0, *index.block(position)) for position in range(len(index.counts))]
    if number is None:
        number = blocks[0].first_record if blocks else 0
    block = next((one for one in blocks if 0 <= number - one.first_record < one.num_records), None)
    if block is None:
        last = blocks[-1].first_record + blocks[-1].num_records - 1 if blocks else "none"
        raise OptionError(
            f"--record must be a healthy record of {file.name}, got {number}",
            hint=f"The last healthy one is {last}; loaderd verify names damaged ones.",
        )
    files, compressions = [file], [index.compression]
    reader: Reader = (
        BlockReader(files, compressions) if records is None else FixedBlockReader(records, files, compressions)
    )
    place = number - block.first_record
    with closing(reader):
        for piece in reader.read(block, place, place + 1):
            if isinstance(piece, Damage):
                raise at_damage(CorruptRecordError, piece, hint="It has been damaged since it was indexed.")
            if 0 <= number - piece.first_record < piece.num_records:
                start = int(piece.payload_starts[number - piece.first_record])
                length = int(piece.payload_lengths[number - piece.first_record])
                return number, piece.buffer[start : start + length].tobytes()
    raise AssertionError("a reader delivers what is in a block, or the damage")


def count_kinds(file: ShardFile, index: ShardIndex, records: FixedRecords) -> tuple[dict[int, int], dict[str, int]]:
    """How many healthy records there are of each size, in bytes; and how many the schema refuses, by why.

    Refused are all records of a member or block that begins with such a one.
    """
    sizes: dict[int, int] = {}
    refused: dict[str, int] = {}
    with closing(FixedBlockReader(records, [file], [index.compression])) as reader:
        for position in range(len(index.counts)):
            block = Block(0, *index.block(position))
            piece = next(iter(reader.read(block, 0, 1)))
            if isinstance(piece, Damage):
                raise at_damage(CorruptRecordError, piece, hint="It has been damaged since it was indexed.")
            size = int(piece.payload_lengths[0])
            sizes[size] = sizes.get(size, 0) + block.num_records
            if why := records.contradiction(piece.buffer[int(piece.payload_starts[0]) :][:size].tobytes()):
                refused[why] = refused.get(why, 0) + block.num_records
    return dict(sorted(sizes.items())), refused


def list_values(records: FixedRecords, record: bytes) -> dict[str, Listed]:
    """The values of a record under each name; of packed bits, the bytes."""
    row = np.frombuffer(record.ljust(records.record_bytes, b"\0"), records.dtype)[0]
    found = {}
    for name in records:
        if records.offset_of(name) >= len(record):  # it is of an older version
            continue
        values = np.asarray(row[name])
        is_bytes = name in records.bits or values.dtype.kind in "SV"
        if values.dtype.kind in "mM":
            values = values.astype(str)
        kind = "bits" if name in records.bits else kind_of(records, name)[0]
        found[name] = Listed(
            f"{kind} {values.shape}", (values.tobytes(),) if is_bytes else tuple(values.reshape(-1).tolist())
        )
    return found


def kind_of(records: FixedRecords, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a field; packed bits are uint8."""
    assert records.dtype.fields is not None
    dtype = records.dtype.fields[name][0]
    return dtype.base.name if dtype.base.kind in "biuf" and dtype.isnative else dtype.base.str, dtype.shape


def _as_python(records: FixedRecords) -> str:
    """A module with a schema that reads each field as an array."""
    arrays = []
    for name, feature in records.items():
        arrays += [f"        # {remark}." for remark in _remarks(name, feature, records)]
        arrays.append(f"        {quoted(name)}: loaderd.Array({quoted(name)}),")
    has_lists = any(feature.pad is not None for feature in records.values())
    numpys, stored = (
        ([], _features_text(records)) if has_lists else (["import numpy as np", ""], _dtype_text(records))
    )
    made = ["schema = loaderd.Schema(", "    loaderd.FixedRecords(record),", "    {", *arrays, "    },", ")"]
    return "\n".join([*numpys, "import loaderd", "", *stored, *made, ""])


def _remarks(name: str, feature: Feature, records: FixedRecords) -> Iterator[str]:
    """What else the values of a feature may be."""
    dtype, count = feature.row_dtype.base, feature.row_dtype.itemsize // feature.row_dtype.base.itemsize
    if dtype == np.uint8 and count > 1 and feature.pad is None:
        stored = f"loaderd.PackedBits({8 * count})" if records.is_of_features else f"bits=[{quoted(name)}]"
        yield f"Bits? Then {stored} in FixedRecords, and loaderd.Bits({quoted(name)}, ({8 * count},))"
        yield from sparse_remarks(name, 8 * count)
    if dtype.kind in "iu" and not isinstance(feature, Length):
        yield from scatter_remarks(name, [each for each, other in records.items() if _is_of_floats(other, count)])


def _is_of_floats(feature: Feature, count: int) -> bool:
    return count > 1 and feature.row_dtype.base.kind == "f" and math.prod(feature.row_dtype.shape) == count


def sparse_remarks(name: str, num_bits: int) -> Iterator[str]:
    if num_bits >= _MANY_BITS:
        yield f"Bits of which few are set? Then loaderd.Sparse({quoted(name)}, k=…)"


def scatter_remarks(name: str, floats: Sequence[str]) -> Iterator[str]:
    """``floats``: features with as many numbers as ``name`` has integers."""
    for other in floats[:1]:
        yield f"The places of {quoted(other)}? Then loaderd.Scatter({quoted(name)}, {quoted(other)}, shape=…)"


def _dtype_text(records: FixedRecords) -> list[str]:
    types = {name: kind_of(records, name) for name in records}
    fields = [f"        ({quoted(name)}, {quoted(dtype)}, {shape})," for name, (dtype, shape) in types.items()]
    offsets, size = [records.offset_of(name) for name in records], records.record_bytes
    packed = [0, *accumulate(feature.num_bytes for feature in records.values())]
    if [*offsets, size] == packed:
        return ["record = np.dtype(", "    [", *fields, "    ]", ")"]
    # There are bytes between the fields that belong to none.
    names, formats = list(records), [f"({quoted(dtype)}, {shape})" for dtype, shape in types.values()]
    record = ["record = np.dtype(", "    {", f'        "names": [{", ".join(map(quoted, names))}],']
    record += [f'        "formats": [{", ".join(formats)}],', f'        "offsets": {offsets},']
    return [*record, f'        "itemsize": {size},', "    }", ")"]


def _features_text(records: FixedRecords) -> list[str]:
    record = ["record = {"]
    for name, feature in records.items():
        if isinstance(feature, Raw) and feature.pad is not None:
            record.append(f"    # Up to {feature.shape[0]} values in the first rows; {PADDED}.")
        if feature.default is not None:
            record.append("    # It has nulls, which become the default.")
        record.append(f"    {quoted(name)}: {as_python(feature)},")
    return [*record, "}"]
