"""For tests of programs that use loaderd: writes arrays to shards, damages records.

::

    arrays = {"board": boards, "score": scores}        # bool (n, 8, 8, 24), int64 (n,)
    paths = loaderd.testing.write_shards(folder, arrays, num_shards=3)
    with loaderd.Loader(paths, loaderd.testing.schema_of(arrays), batch_size=32) as loader:
        ...                                            # the same arrays, shuffled
    loaderd.testing.damage(paths[0], record=5)         # CorruptRecordError, at shard, record and offset

An array's dtype says how it is stored, and all come back as they were:

    bool       packed bits (PackedBits)      int64      a list of integers (Int64)
    float32    a list of floats (Float)      others     the bytes of the array (Raw)
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderd.decode.example_writer import Rows, encode_examples
from loaderd.errors import OptionError
from loaderd.formats.compression import detect_compression
from loaderd.kernels.crc import FRAME_BYTES, HEADER_BYTES, framed
from loaderd.options import as_count, is_path, require
from loaderd.schema import Array, Bits, Feature, Float, Int64, PackedBits, Raw, Schema
from loaderd.schema.fields import Field
from loaderd.storage.files import list_shards, open_shard

Arrays = Mapping[str, Any]
Compression = Literal["none", "gzip", "zlib"]
How = Literal["data", "length", "cut"]

_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_BYTES = (bytes, bytearray, memoryview)


def write_shards(
    folder: str | os.PathLike[str],
    records: Arrays | Iterable[bytes],
    *,
    num_shards: int = 1,
    compression: Compression = "none",
) -> list[Path]:
    """Write ``records`` into ``folder``, which is made if need be, as 00000.tfrecord and so on; returns the paths.

    ``records``: a dict of names and arrays, whose first dimension is the records (the module says how each dtype is
    stored); or serialized ``tf.train.Example``, or any bytes, one for each record. Shards hold consecutive records,
    as equal in number as can be. Files of these names are overwritten. Raises OptionError for ``records`` that are
    neither; and where ``folder`` has shards of higher numbers, so that a glob never mixes old records with new ones.
    """
    is_known = isinstance(compression, str) and compression in ("none", *_WINDOW_BITS)
    require(is_known, "compression", "one of none, gzip, zlib", compression)
    require(is_path(folder), "folder", "a path", folder)
    num_shards = as_count(num_shards, "num_shards")
    payloads = list(_examples(records) if isinstance(records, Mapping) else _as_bytes(records))
    Path(folder).mkdir(parents=True, exist_ok=True)
    _refuse_beside_others(Path(folder), num_shards)
    paths = []
    for shard in range(num_shards):
        first, stop = (len(payloads) * end // num_shards for end in (shard, shard + 1))
        stream = b"".join(map(framed, payloads[first:stop]))
        if compression != "none":
            compressor = zlib.compressobj(wbits=_WINDOW_BITS[compression])
            stream = compressor.compress(stream) + compressor.flush()
        paths.append(Path(folder) / f"{shard:05}.tfrecord")
        paths[-1].write_bytes(stream)
    return paths


def _refuse_beside_others(folder: Path, num_shards: int) -> None:
    others = [
        path.name for path in folder.glob("*.tfrecord") if path.stem.isdecimal() and int(path.stem) >= num_shards
    ]
    if others:
        raise OptionError(
            f"folder must hold no shard numbered {num_shards} or above, beside which {num_shards} would be written; "
            f"got {folder}, which holds {min(others)}",
            hint="Give another folder, or delete what an earlier call left there.",
        )


def schema_of(arrays: Arrays) -> Schema:
    """The schema with which a loader gives back ``arrays`` that :func:`write_shards` wrote. Raises OptionError."""
    features: dict[str, Feature] = {}
    fields: dict[str, Field] = {}
    for name, array in _checked(arrays).items():
        shape = array.shape[1:]
        fields[name] = Array(name)
        if array.dtype == np.bool_:
            features[name] = PackedBits(array[0].size)
            fields[name] = Bits(name, shape, dtype="bool")
        elif array.dtype == np.int64:
            features[name] = Int64(shape)
        elif array.dtype == np.float32:
            features[name] = Float(shape)
        else:
            features[name] = Raw(array.dtype, shape)
    return Schema(features, fields)


def damage(shard: str | os.PathLike[str], *, record: int = 0, how: How = "data") -> int:
    """Damage one record of an uncompressed TFRecord shard in place; returns the byte at which the record begins.

    ``how``: ``"data"`` flips a bit of its data (or of the CRC behind, where it has none), so that this record alone
    is lost; ``"length"`` flips a bit of its length; ``"cut"`` ends the file in the middle of the record. Raises
    OptionError for a record that does not exist, and for a compressed shard.
    """
    require(isinstance(how, str) and how in ("data", "length", "cut"), "how", "one of data, length, cut", how)
    require(is_path(shard), "shard", "a path", shard)
    record = as_count(record, "record", "an integer from 0 on", 0)
    path = Path(shard)
    if _compression_of(path) != "none":
        raise OptionError(
            f"damage() needs an uncompressed shard, but {path} is compressed", hint="Write it without compression."
        )
    content = bytearray(path.read_bytes())
    offset, number = 0, 0
    while number < record and offset < len(content):
        offset += _length_at(content, offset) + FRAME_BYTES
        number += 1
    if offset + FRAME_BYTES > len(content):
        raise OptionError(f"record must be one that {path} has, got {record}", hint=f"It has {number}.")
    if how == "cut":
        del content[offset + (_length_at(content, offset) + FRAME_BYTES) // 2 :]
    else:
        content[offset + (HEADER_BYTES if how == "data" else 0)] ^= 1
    path.write_bytes(content)
    return offset


def _checked(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """``arrays`` as numpy's. Raises OptionError unless all have the same number of records, at least one."""
    require(isinstance(arrays, Mapping), "records", "a dict of names and arrays", arrays)
    for name in arrays:
        is_name = isinstance(name, str) and name == name.encode(errors="replace").decode()
        require(is_name, "each name of records", "text that is valid Unicode", name)
    made = {name: _as_array(array, f"records[{name!r}]") for name, array in arrays.items()}
    lengths = {name: array.shape[0] if array.ndim else None for name, array in made.items()}
    alike = len(set(lengths.values())) == 1 and None not in lengths.values() and 0 not in lengths.values()
    require(alike, "records", "arrays with as many records each, at least one, in their first dimension", lengths)
    for name, array in made.items():
        require(not array.dtype.hasobject, f"records[{name!r}]", "of a dtype of fixed size", array.dtype)
    return made


def _as_array(values: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
    """``values`` as an array. Raises OptionError where they are none, such as lists of different lengths."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{what} must be an array, got {values!r:.300}", hint=f"numpy says: {error}") from None


def _examples(arrays: Arrays) -> Iterator[bytes]:
    schema = schema_of(arrays)
    return encode_examples(_rows(_checked(arrays), schema), schema.features)


def _as_bytes(records: Iterable[bytes]) -> Iterator[bytes]:
    is_many = isinstance(records, Iterable) and not isinstance(records, (str, *_BYTES))
    require(is_many, "records", "a dict of arrays, or a list of bytes", records)
    for number, record in enumerate(records):
        require(isinstance(record, _BYTES), f"records[{number}]", "bytes", record)
        yield bytes(record)


def _rows(arrays: dict[str, np.ndarray[Any, Any]], schema: Schema) -> Rows:
    """(n,): the arrays as rows of the schema's stored features."""
    rows = np.zeros(len(next(iter(arrays.values()))), schema.row_dtype)
    for name, array in arrays.items():
        is_bits = array.dtype == np.bool_
        rows[name] = np.packbits(array.reshape(len(rows), -1), axis=1) if is_bits else array
    return rows


def _length_at(content: bytearray, offset: int) -> int:
    return int.from_bytes(content[offset : offset + 8], "little")


def _compression_of(path: Path) -> str:
    (file,) = list_shards(path)
    with closing(open_shard(file)) as opened:
        return detect_compression(file.uri, opened.read_at, file.size_bytes)
