"""Records in the arrays of an npz: each array has a row a record, and a field of the record's dtype its name.

An npz is a zip of ``.npy`` files, deflated or stored. The arrays that the schema reads are inflated whole; the others
are not looked at.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import Damage, ShardReadError
from loaderd.schema import FixedRecords
from loaderd.shards.crc import Bytes1D
from loaderd.shards.inflate import crc32, inflate_raw
from loaderd.shards.shard_file import OpenFile
from loaderd.shards.zstd import FileReader

_HINT = "Check that the schema's dtype is what the file holds; or restore the file."
_LOCAL_HEADER = struct.Struct("<26xHH")  # bytes of the name and of the extra field (PKWARE's APPNOTE, 4.3.7)

Arrays = dict[str, npt.NDArray[Any]]


def load_arrays(shard: str, file: OpenFile, size_bytes: int, records: FixedRecords) -> Arrays:
    """The array of each field, (n, *the field's shape), n being the same for all.

    Raises ShardReadError where one is missing, damaged, of another dtype or shape, or has another number of rows.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(FileReader(file, size_bytes))) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _bad(shard, 0, "a whole npz", f"{error}") from None
    arrays: Arrays = {}
    for name in records:
        if name not in entries:
            raise _bad(shard, 0, f"an array {name!r}", f"only {sorted(entries)}")
        arrays[name] = _array(shard, file, entries[name], name, records)
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise _bad(shard, 0, "arrays with one row a record", f"rows: {rows}")
    return arrays


def gather(arrays: Arrays, records: FixedRecords, first: int, stop: int) -> Bytes1D:
    """uint8, ((stop - first) * record_bytes,): rows of all arrays as records."""
    found = np.zeros(stop - first, records.dtype)
    for name, array in arrays.items():
        found[name] = array[first:stop]
    return found.view(np.uint8).reshape(-1)


def _array(shard: str, file: OpenFile, entry: zipfile.ZipInfo, name: str, records: FixedRecords) -> npt.NDArray[Any]:
    data = _inflated(shard, file, entry)
    assert records.dtype.fields is not None
    field = records.dtype.fields[name][0]
    try:
        header = io.BytesIO(data[:65536])
        version = np.lib.format.read_magic(header)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(header)
    except ValueError as error:
        raise _bad(shard, entry.header_offset, f"a numpy array in {entry.filename}", f"{error}") from None
    in_order = not is_fortran or len(shape) == 1
    if dtype != field.base or shape[1:] != field.shape or not shape or not in_order:
        expected = f"array {name!r} of {field.base}, (rows{''.join(f', {dim}' for dim in field.shape)}) in C order"
        order = "" if in_order else " in Fortran order"
        raise _bad(shard, entry.header_offset, expected, f"{dtype}, {shape}{order}")
    if len(data) - header.tell() < math.prod(shape) * dtype.itemsize:
        raise _bad(shard, entry.header_offset, f"the values of {name!r}, {shape}", f"{len(data)} bytes")
    return np.frombuffer(data, dtype, math.prod(shape), header.tell()).reshape(shape)


def _inflated(shard: str, file: OpenFile, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry, its CRC checked."""
    offset, what = entry.header_offset, entry.filename
    header = bytearray(_LOCAL_HEADER.size)
    file.read_at(offset, memoryview(header))
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    stored = bytearray(entry.compress_size)
    got = file.read_at(offset + len(header) + name_bytes + extra_bytes, memoryview(stored))
    if got < len(stored):
        raise _bad(shard, offset, f"{len(stored)} bytes of {what}", f"{got}")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
        raise _bad(shard, offset, f"{what} deflated or stored", f"method {entry.compress_type}, encrypted or another")
    data = bytes(stored)
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        try:
            data = inflate_raw(stored, entry.file_size)
        except Exception as error:  # each library has errors of its own
            raise _bad(shard, offset, f"valid compressed data of {what}", f"{error}") from None
    if len(data) != entry.file_size or crc32(data) != entry.CRC:
        expected = f"{what} of {entry.file_size} bytes with its CRC"
        raise _bad(shard, offset, expected, f"{len(data)} bytes with another")
    return data


def _bad(shard: str, offset: int, expected: str, found: str) -> ShardReadError:
    damage = Damage(shard, 0, offset, expected, found, lost_bytes=-1)
    return ShardReadError(str(damage), hint=_HINT, damage=damage)
