"""Files of converted records, written a few rows at a time: TFRecord, records of fixed size, npz.

=========  ====================================================  =================
format     what is in the file                                   ``compression``
=========  ====================================================  =================
tfrecord   a framed ``tf.train.Example`` for each record         none, gzip, zlib
records    the stored features, one behind the other, no gaps    none, gzip
npz        an array for each feature, a row for each record      none, gzip (deflated)
=========  ====================================================  =================
"""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loaderd.decode.example_writer import Rows, encode_examples
from loaderd.errors import OptionError
from loaderd.kernels.crc import framed
from loaderd.schema import Feature, Schema
from loaderd.schema.features import is_numpys

Format = Literal["tfrecord", "records", "npz"]
OutCompression = Literal["none", "gzip", "zlib"]

COMPRESSIONS: Mapping[str, tuple[str, ...]] = {
    "tfrecord": ("none", "gzip", "zlib"),
    "records": ("none", "gzip"),
    "npz": ("none", "gzip"),
}
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_ENDINGS = {"tfrecord": ".tfrecord", "records": ".bin", "npz": ".npz"}
_PACKED = {"none": "", "gzip": ".gz", "zlib": ".zz"}


def ending_of(format: Format, compression: OutCompression) -> str:
    """How the names of files of this format and compression end."""
    return _ENDINGS[format] + ("" if format == "npz" else _PACKED[compression])


def schema_of_format(features: Mapping[str, Feature], format: Format) -> Schema:
    """The schema with which files of this format are read; rows have the same bytes in all formats."""
    stored = Schema.of_stored(features)
    return Schema.of_stored((stored.as_examples() if format == "tfrecord" else stored.as_records()).features)


def check_format(features: Mapping[str, Feature], format: Format) -> None:
    """Raise OptionError for a feature that files of this format cannot hold."""
    if format != "npz":
        return
    for name, feature in features.items():
        dtype = feature.row_dtype.base
        if not is_numpys(dtype) or np.dtype(dtype.str) != dtype:
            raise OptionError(
                f"--format npz cannot hold feature {name!r}: .npy files know numpy's own dtypes only, and would "
                f"call its {dtype} {dtype.str!r}",
                hint="Convert to tfrecord or records.",
            )


def open_writer(
    path: Path, features: Mapping[str, Feature], format: Format, compression: OutCompression
) -> _StreamWriter | _NpzWriter:
    """A writer of rows of ``features`` to a new file, which is no shard before it is closed. Raises OSError."""
    records = schema_of_format(features, format).records
    if records is None:
        return _StreamWriter(path, compression, lambda rows: b"".join(map(framed, encode_examples(rows, features))))
    dtype = records.dtype
    if format == "npz":
        return _NpzWriter(path, dtype, compression)
    return _StreamWriter(path, compression, lambda rows: _packed(rows, dtype).tobytes())


def _packed(rows: Rows, dtype: np.dtype[Any]) -> Rows:
    packed = np.empty(len(rows), dtype)
    for name in dtype.names or ():
        packed[name] = rows[name]
    return packed


class _StreamWriter:
    """Records one behind the other, in one stream."""

    def __init__(self, path: Path, compression: OutCompression, encode: Callable[[Rows], bytes]) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  # closed by close() or abort()
        self._encode = encode
        self._compressor = None if compression == "none" else zlib.compressobj(wbits=_WINDOW_BITS[compression])

    def write(self, rows: Rows) -> None:
        data = self._encode(rows)
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def close(self) -> None:
        with self._file:
            if self._compressor is not None:
                self._file.write(self._compressor.flush())
            self._file.flush()
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # what is not written yet, on a disk that is full
            self._file.close()


class _NpzWriter:
    """Arrays follow each other in an npz, so records are kept in a file beside it until all have come."""

    def __init__(self, path: Path, dtype: np.dtype[Any], compression: OutCompression) -> None:
        self._path = path
        self._dtype = dtype
        self._method = zipfile.ZIP_STORED if compression == "none" else zipfile.ZIP_DEFLATED
        self._kept_path = path.with_name(f"{path.name}.rows.tmp")
        self._kept = open(self._kept_path, "xb+")  # noqa: SIM115  # closed by close() or abort()

    def write(self, rows: Rows) -> None:
        self._kept.write(_packed(rows, self._dtype).tobytes())

    def close(self) -> None:
        self._kept.flush()
        records: Rows = np.memmap(self._kept_path, self._dtype, "r")
        with open(self._path, "xb") as file:
            with zipfile.ZipFile(file, "w", self._method) as archive:
                for name in self._dtype.names or ():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, records[name], allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        self.abort()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._kept.close()
        self._kept_path.unlink(missing_ok=True)
