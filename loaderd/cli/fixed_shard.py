"""What ``loaderd inspect`` finds in a shard of records of a fixed size: what they are, what wraps them, a record."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from loaderd.decode.example import Listed
from loaderd.errors import CorruptRecordError, Damage, OptionError, at_damage
from loaderd.formats.detect import detect_schema
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.kinds import ZIP_MAGIC
from loaderd.formats.npz import arrays_of
from loaderd.formats.shard_index import ShardIndex
from loaderd.formats.tar import find_members
from loaderd.schema import FixedRecords, Schema
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import Block, OpenFile, ShardFile

WRAPPED = {
    "none": "one behind the other in a file",
    "gzip": "compressed with gzip to a file",
    "zstd": "compressed with zstd to a file",
    "tar": "in a tar",
    "npz": "as rows of an npz",
}
"""How a shard wraps its records, in words."""
_NO_SCHEMA = "none is known, so these are the arrays of the npz"


@dataclass(frozen=True)
class StoredFormat:
    """What the records of a shard are. ``schema``: None for an npz of which nothing is known but its arrays.

    ``named``: the schema in words. ``python``: the text of a module with the schema, or with one that reads all
    arrays; "" if the user gave the schema.
    """

    records: FixedRecords
    schema: Schema | None
    named: str
    python: str


def stored_of(schema: Schema, name: str) -> StoredFormat | None:
    """The records that ``schema`` describes; None: TFRecord. ``name``: what the user calls the schema."""
    return None if schema.records is None else StoredFormat(schema.records, schema, name, "")


def stored_in(file: ShardFile) -> StoredFormat | None:
    """What the content of a shard shows of its records; None: it is TFRecord, or does not show what it is.

    Raises ShardReadError, SchemaError and StorageError.
    """
    told = detect_schema(file)
    if told is not None:
        assert told.schema.records is not None
        module = f"import loaderd\n\nschema = {told.made_by}\n"
        return StoredFormat(told.schema.records, told.schema, f"{told.made_by}, told by the content", module)
    with closing(open_shard(file)) as opened:
        records = _npz_records(file, opened)
    return None if records is None else StoredFormat(records, None, _NO_SCHEMA, _as_python(records))


def _npz_records(file: ShardFile, opened: OpenFile) -> FixedRecords | None:
    head = bytearray(len(ZIP_MAGIC))
    if not opened.read_at(0, memoryview(head)) or head != ZIP_MAGIC:
        return None
    return FixedRecords(np.dtype(list(arrays_of(file, opened).items())))


def skipped_members(file: ShardFile, index: ShardIndex) -> list[str]:
    """The members of a tar that hold no records."""
    names: list[str] = []
    if index.compression == "tar":
        with closing(open_shard(file)) as opened:
            list(find_members(file.uri, opened, file.size_bytes, names.append))
    return names


def record_of(file: ShardFile, index: ShardIndex, records: FixedRecords, number: int | None) -> tuple[int, bytes]:
    """(number, bytes) of record ``number``; None: the first healthy one. Raises OptionError if it is not healthy."""
    if number is None:
        number = int(index.first_records[0]) if index.num_records else 0
    blocks = [Block(0, *index.block(position)) for position in range(len(index.counts))]
    block = next((one for one in blocks if 0 <= number - one.first_record < one.num_records), None)
    if block is None:
        last = max((one.first_record + one.num_records - 1 for one in blocks), default=-1)
        raise OptionError(
            f"--record must be a healthy record of {file.name}, got {number}",
            hint=f"The last healthy one is {last}; loaderd verify names damaged ones."
            if last >= 0
            else "It has none.",
        )
    place = number - block.first_record
    with closing(FixedBlockReader(records, [file], [index.compression])) as reader:
        for found in reader.read(block, place, place + 1):
            if isinstance(found, Damage):
                raise at_damage(CorruptRecordError, found, hint="It has been damaged since it was indexed.")
            start = int(found.payload_starts[number - found.first_record])
            return number, found.buffer[start : start + records.record_bytes].tobytes()
    raise AssertionError("a reader delivers what is in a block, or the damage")


def list_values(records: FixedRecords, record: bytes) -> dict[str, Listed]:
    """The values of a record under each name; of packed bits, the bytes."""
    row = np.frombuffer(record, records.dtype)[0]
    found = {}
    for name in records:
        values = np.asarray(row[name])
        is_bytes = name in records.bits or values.dtype.kind in "SV"
        kind = "bits" if name in records.bits else str(values.dtype)
        if values.dtype.kind in "mM":
            values = values.astype(str)
        found[name] = Listed(kind, (values.tobytes(),) if is_bytes else tuple(values.reshape(-1).tolist()))
    return found


def kind_of(records: FixedRecords, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a field; packed bits are uint8."""
    assert records.dtype.fields is not None
    dtype = records.dtype.fields[name][0]
    return dtype.base.name if dtype.base.kind in "biuf" and dtype.isnative else dtype.base.str, dtype.shape


def _as_python(records: FixedRecords) -> str:
    """A module with a schema that reads each field as an array."""
    types = {name: kind_of(records, name) for name in records}
    fields = [f"        ({quoted(name)}, {quoted(dtype)}, {shape})," for name, (dtype, shape) in types.items()]
    arrays = [f"        {quoted(name)}: loaderd.Array({quoted(name)})," for name in types]
    record = ["record = np.dtype(", "    [", *fields, "    ]", ")"]
    made = ["schema = loaderd.Schema(", "    loaderd.FixedRecords(record),", "    {", *arrays, "    },", ")"]
    return "\n".join(["import numpy as np", "", "import loaderd", "", *record, *made, ""])


def quoted(name: str) -> str:
    """A literal of Python in double quotes, as formatters want them."""
    return json.dumps(name, ensure_ascii=False)  # else a letter beyond U+FFFF became two surrogates
