"""A record as people look at it: its stored values as text, and what is delivered for it, as text or a picture."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loaderd.cli.parallel_scan import say
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.decode.example import Listed, RecordFault
from loaderd.decode.example_rows import RowParser
from loaderd.decode.fixed_rows import FixedParser
from loaderd.errors import OptionError, RecordMismatchError, install_hint
from loaderd.schema import Schema
from loaderd.schema.features import is_numpys
from loaderd.schema.grids import Values, draw, picture, planes_of, stacked
from loaderd.storage.shard_file import ShardFile

_SHOWN_VALUES = 8
_SHOWN_BYTES = 24


def write_png(fields: Mapping[str, Values], path: Path) -> None:
    """Write a picture of the planes of all fields. Raises OptionError."""
    pictures = [picture(found) for value in fields.values() if (found := planes_of(value)) is not None]
    if not pictures:
        raise OptionError("--png needs a field with planes, of two or three axes, and the schema has none")
    try:
        from PIL import Image
    except ImportError:
        raise OptionError(f"--png needs Pillow: {install_hint('images')}") from None
    try:
        Image.fromarray(stacked(pictures)).save(path, "PNG")
    except OSError as error:
        raise OptionError(f"--png {path} cannot be written: {error.strerror or error}") from None


def decode(
    records: Sequence[tuple[ShardFile, int, bytes]], schema: Schema, at_once: int
) -> Iterator[dict[str, Values]]:
    """What a loader delivers for records (shard, number, bytes), ``at_once`` of them at a time, field by field.

    Each array is (records, …). Random fields draw the same numbers at each call. Raises RecordMismatchError for the
    first record that is not what the schema says, and WorkerError.
    """
    parser = RowParser(schema) if schema.records is None else FixedParser(schema)
    decoder = BatchDecoder(schema)
    for first in range(0, len(records), at_once):
        some = records[first : first + at_once]
        rows = np.zeros((len(some), schema.row_bytes), np.uint8)
        buffer = np.frombuffer(b"".join(record for *_, record in some), np.uint8)
        lengths = np.array([len(record) for *_, record in some], np.int64)
        for fault in parser.parse(buffer, lengths.cumsum() - lengths, lengths, rows, np.arange(len(some))):
            raise mismatch(*some[fault.record][:2], fault)
        out = {name: np.empty((len(some), *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
        decoder.decode(rows, out)
        yield out


def mismatch(file: ShardFile, number: int, fault: RecordFault) -> RecordMismatchError:
    """The error for a record that is not what the schema says."""
    text = f"{file.uri}: record {number}: expected {fault.expected}, found {fault.found}"
    shown = "Without --record and --schema, loaderd inspect shows the stored features."
    return RecordMismatchError(text, hint=f"{fault.remedy} {shown}")


def show_fields(fields: Mapping[str, Values]) -> None:
    """Print each field that is delivered for a record; planes are drawn."""
    width = shutil.get_terminal_size((120, 24)).columns
    for name, value in fields.items():
        say(f"\n{name}: {value.dtype} {value.shape}")
        found = planes_of(value)
        say(np.array2string(value, threshold=100) if found is None else draw(found, width))


def listed_text(listed: Listed) -> str:
    """The kind and the first values, as text."""
    shown = [_text(value) for value in listed.values[:_SHOWN_VALUES]]
    more = f", … {len(listed.values):,} values" if len(listed.values) > _SHOWN_VALUES else ""
    return f"{listed.kind} {', '.join(shown)}{more}"


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    more = f"… {len(value):,} bytes" if len(value) > _SHOWN_BYTES else ""
    return f"{value[:_SHOWN_BYTES].hex(' ')}{more}"


def plain(value: Any) -> Any:
    """A value, or lists of values, as JSON can hold them: see "Looking into shards" in docs/records.md."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, int | str) else str(value)


def plain_array(value: Values) -> Any:
    """An array as lists that JSON can hold; text remains text, and bytes that are no UTF-8 are escaped in it."""
    if value.dtype.kind == "S":
        return np.char.decode(value, "utf-8", "backslashreplace").tolist()
    if value.dtype.kind == "V":  # one of ml_dtypes, or bytes; of a structure, too
        value = value.view(f"V{value.itemsize}") if is_numpys(value.dtype) else value.astype(np.float32)
    return plain((value.astype(str) if value.dtype.kind in "mM" else value).tolist())
