"""The header of an array of numpy's, by a parser of its own.

numpy evaluates the header as Python: of some, that takes all memory of Python's parser. Here it is matched by regular
expressions, of at most 64 KiB (numpy.lib.format describes versions 1, 2 and 3). A dtype of objects, which would need
pickle, has no other way in.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from loaderd.formats.kinds import NPY_MAGICS
from loaderd.formats.table import bad_table
from loaderd.schema import FixedRecords
from loaderd.schema.exact import is_shaped
from loaderd.storage.shard_file import ReadAt, ShardFile

VALUES = "values"
"""What ``loaderd inspect`` calls the one feature of an array without field names."""
_HINT = "Restore the file, or write it anew with np.save(path, array)."
_MOST_HEADER_BYTES = 1 << 16
_MOST_DTYPE_BYTES = (1 << 31) - 1  # of numpy's, which doesn't say so of a structured dtype
_DTYPE = r"[<>|=]?[a-zA-Z]\d{0,9}(?:\[\w{1,9}\])?"
_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_INTEGERS = r"[\d,L\s]{0,999}"
_FIELD = re.compile(
    rf"\(\s*(?P<name>{_TEXT})\s*,\s*['\"](?P<dtype>{_DTYPE})['\"]\s*(?:,\s*\((?P<shape>{_INTEGERS})\)\s*)?,?\s*\)"
)
_DESCR = re.compile(rf"""['"]descr['"]\s*:\s*(?:['"](?P<dtype>{_DTYPE})['"]|\[)""")
_BETWEEN = re.compile(r"\s*(?P<sign>[,\]])\s*(?P<end>\])?")
_FORTRAN_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)\b""")
_SHAPE = re.compile(rf"""['"]shape['"]\s*:\s*\(({_INTEGERS})\)""")


class NpyHeader(NamedTuple):
    """``start``: the byte at which the values begin."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def is_in_order(self) -> bool:
        """Whether a row lies behind the other: in C order, or in one that is the same for this shape."""
        return not self.is_fortran or is_shaped(self.shape, (math.prod(self.shape),))


def read_header(take: Callable[[int], bytes]) -> NpyHeader:
    """The header of an array; ``take`` gives its next bytes, fewer at the end. Raises ValueError."""
    front = take(len(NPY_MAGICS[0]))
    length = take(2 if front[-2:-1] == b"\1" else 4)  # the format's first version, or a later one
    stored = take(min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES))
    text = stored.decode("utf-8" if front[-2:-1] == b"\3" else "latin-1", errors="replace").strip()
    is_dict = front in NPY_MAGICS and text[:1] == "{" and text[-1:] == "}"
    order, dims = _FORTRAN_ORDER.search(text), _SHAPE.search(text)
    if not is_dict or order is None or dims is None:
        raise ValueError(f"{front + stored!r:.250}")
    try:
        shape, dtype = _integers(dims[1]), _dtype_of(text)
    except (LookupError, OverflowError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{error}: {front + stored!r:.250}") from None
    if dtype.hasobject:
        raise ValueError(f"objects of Python's ({dtype}), which are pickles")
    return NpyHeader(shape, order[1] == "True", dtype, len(front) + len(length) + len(stored))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _dtype_of(header: str) -> np.dtype[Any]:
    """Raises ValueError where ``descr`` is none, and for fields within fields, and titles."""
    descr = _DESCR.search(header)
    if descr is None:
        raise ValueError("no dtype of values, or of named fields that hold values")
    if descr["dtype"] is not None:
        return np.dtype(descr["dtype"])
    names, formats, offsets, end, at = [], [], [], 0, descr.end()
    while True:
        field = _FIELD.match(header, at)
        if field is None:
            raise ValueError("no dtype of named fields that hold values")
        name, dtype = ast.literal_eval(field["name"]), np.dtype((field["dtype"], _integers(field["shape"] or "")))
        if name or dtype.kind != "V":  # numpy writes padding as a field without a name
            names.append(name)
            formats.append(dtype)
            offsets.append(end)
        end += dtype.itemsize
        between = _BETWEEN.match(header, field.end())
        if between is None or end > _MOST_DTYPE_BYTES:
            raise ValueError("no end of a dtype's fields" if between is None else f"a record of {end} bytes")
        if "]" in (between["sign"], between["end"]):
            return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})
        at = between.end()


def row_dtype(header: NpyHeader) -> np.dtype[Any]:
    """The dtype of a row, with named fields; raises ValueError where no row of fixed size is one."""
    if not header.shape:
        raise ValueError("a single value, without rows")
    if header.dtype.names and len(header.shape) == 1:
        return header.dtype
    return np.dtype([(VALUES, np.dtype((header.dtype, header.shape[1:])))])


def open_npy(file: ShardFile, read_at: ReadAt) -> NpyHeader:
    """The header of a file. Raises ShardReadError where it has none, or no rows in C order."""
    at = 0

    def take(num_bytes: int) -> bytes:
        nonlocal at
        data = bytearray(num_bytes)
        got = read_at(at, memoryview(data))
        at += got
        return bytes(data[:got])

    try:
        header = read_header(take)
        row_dtype(header)
    except ValueError as error:
        raise bad_table(file.uri, 0, "an array of numpy's with a row for each record", f"{error}", _HINT) from None
    if not header.is_in_order:
        hint = "Write it anew: np.save(path, np.ascontiguousarray(np.load(path)))."
        raise bad_table(file.uri, 0, "rows one behind the other (C order)", f"{header.shape} in Fortran order", hint)
    return header


def rows_in(file: ShardFile, read_at: ReadAt, records: FixedRecords) -> tuple[int, int]:
    """(the byte at which ``records`` begin, how many there should be) in a file.

    Raises ShardReadError where its rows are no such records: an array of structured dtype must have the fields of
    ``records`` at the same bytes of a record of the same size; any other one is the only field.
    """
    header = open_npy(file, read_at)
    found = row_dtype(header)
    assert found.fields is not None and records.dtype.fields is not None
    if header.dtype.names:
        fits = found.itemsize == records.record_bytes and all(
            name in found.fields and found.fields[name][:2] == records.dtype.fields[name][:2] for name in records
        )
    else:
        field, row = records.dtype.fields[next(iter(records))][0], found.fields[VALUES][0]
        fits = len(records) == 1 and row.itemsize == records.record_bytes == field.itemsize
        fits = fits and row.base == field.base and is_shaped(row.shape, field.shape)
    if not fits:
        hint = "Give FixedRecords of its dtype: `loaderd inspect SHARD --features` proposes it."
        of_file = f"rows of {found if header.dtype.names else found.fields[VALUES][0]}"
        raise bad_table(file.uri, 0, f"rows of {records.dtype}", of_file, hint)
    return header.start, header.shape[0]
