"""Records of fixed size that tell their number, and files of them, wrapped in every way."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import feather
from pyarrow import parquet as pq

import loaderd

DTYPE = np.dtype([("version", "<u2"), ("planes", "u1", (5,)), ("number", "<i4"), ("values", "<f4", (3,))])
RECORDS = loaderd.FixedRecords(DTYPE, bits=["planes"], expect={"version": 3})
SCHEMA = loaderd.Schema(
    RECORDS,
    {"number": loaderd.Array("number"), "bits": loaderd.Bits("planes", (40,)), "values": loaderd.Array("values")},
)
Records = npt.NDArray[np.void]


def records_from(first: int, count: int) -> Records:
    """``count`` records; what each holds follows from its number."""
    records = np.zeros(count, DTYPE)
    records["version"] = 3
    records["number"] = np.arange(first, first + count)
    records["planes"] = (records["number"][:, None] * 37 + np.arange(5) * 11) % 256
    records["values"] = np.random.default_rng(first).random((count, 3), np.float32)
    return records


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def tar_of(members: Sequence[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def npz_of(records: Records) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, other=np.arange(3), **{name: records[name] for name in DTYPE.names or ()})
    return out.getvalue()


def npy_of(records: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, records, allow_pickle=False)
    return out.getvalue()


def table_of(records: Records) -> pa.Table:
    """The records as columns, and one more: bits in a fixed_size_binary, values in a fixed_size_list."""
    planes = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(5), len(records), [None, pa.py_buffer(records["planes"].tobytes())]
    )
    values = pa.FixedSizeListArray.from_arrays(records["values"].reshape(-1), 3)
    numbers = {name: np.ascontiguousarray(records[name]) for name in ("version", "number")}
    return pa.table({"other": [None] * len(records), **numbers, "planes": planes, "values": values})


def parquet_of(records: Records) -> bytes:
    """Row groups of 20."""
    out = io.BytesIO()
    pq.write_table(table_of(records), out, row_group_size=20, compression="zstd")
    return out.getvalue()


def arrow_of(records: Records) -> bytes:
    """Record batches of 20."""
    out = io.BytesIO()
    feather.write_feather(table_of(records), out, compression="lz4", chunksize=20)
    return out.getvalue()


def wrapped(records: Records, how: str) -> bytes:
    """A file of these records; a tar has games of 10, of which every third is a zstd file."""
    data = records.tobytes()
    if how == "tar":
        games = [records[start : start + 10].tobytes() for start in range(0, len(records), 10)]
        members = [
            (f"games/{number}.zst", zstd(game)) if number % 3 == 2 else (f"games/{number}.gz", gzip.compress(game))
            for number, game in enumerate(games)
        ]
        return tar_of([("LICENSE", b"ODbL"), *members, ("games/README", b"none")])
    of_records = {"npz": npz_of, "npy": npy_of, "parquet": parquet_of, "arrow": arrow_of}
    if how in of_records:
        return of_records[how](records)
    return {"none": bytes, "gzip": gzip.compress, "zstd": zstd}[how](data)


WRAPPINGS = ("none", "gzip", "zstd", "tar", "npz", "npy", "parquet", "arrow")


def write_all(folder: Path, count: int = 60) -> Records:
    """A shard of each wrapping; all records, in the shards' order."""
    every = []
    for number, how in enumerate(WRAPPINGS):
        records = records_from(count * number, count)
        (folder / f"{number}-{how}").write_bytes(wrapped(records, how))
        every.append(records)
    return np.concatenate(every)


def with_hidden_end(data: bytes) -> bytes:
    """A GZIP file with a flipped bit that makes it look as if it were cut, and its last records other ones."""
    whole = gzip.decompress(data)
    for bit in range(8 * (len(data) - 8) - 1, 0, -1):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        inflater = zlib.decompressobj(31)
        with contextlib.suppress(zlib.error):
            found = inflater.decompress(broken)
            if not inflater.eof and not whole.startswith(found[: len(whole)]):
                return bytes(broken)
    raise AssertionError("no bit does it")


def garbled(data: bytes, place: int) -> bytes:
    """``data`` with eight other bytes from ``place`` on."""
    return data[:place] + bytes(byte ^ 0x55 for byte in data[place : place + 8]) + data[place + 8 :]
