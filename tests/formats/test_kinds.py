"""Files that are plainly of another kind: recognized, named, refused; and records that only look like one, read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import loaderd
from loaderd.errors import ShardFormatError
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.kinds import KINDS, Content, is_tar_header, kind_of
from loaderd.formats.shard_index import build_index
from tests.formats.shard_bytes import frames, make_shard, payloads_of, random_payloads
from tests.helpers.fixed_files import tar_of, zstd
from tests.helpers.record_bytes import header

BYTES = loaderd.FixedRecords([("x", "u1", (1,))])
"""Records of which any file has a whole number."""
NUMBERS = loaderd.FixedRecords([("x", "<f4")])
TEXT = b"# Shards\n\nEach game is a record: \xc3\xbc 1.\n" * 40
PAGE = b"<!DOCTYPE html>\n<html><body>Sign in, please.</body></html>\n" * 4


def saved(save: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def table(write: Callable[[pa.Table, Any], Any]) -> bytes:
    return saved(lambda file: write(pa.table({"x": np.arange(1000)}), file))


def parquet(rows: pa.Table, file: Any) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(rows, file)


def orc(rows: pa.Table, file: Any) -> None:
    import pyarrow.orc

    pyarrow.orc.write_table(rows, file)


def feather(rows: pa.Table, file: Any) -> None:
    import pyarrow.feather

    pyarrow.feather.write_feather(rows, file)


def hdf5() -> bytes:
    import h5py

    with h5py.File("a", "w", driver="core", backing_store=False) as file:
        file["x"] = np.arange(9)
        file.flush()
        return bytes(file.id.get_file_image())


def matlab(file: Any) -> None:
    import scipy.io

    scipy.io.savemat(file, {"x": np.arange(9)})


def sqlite() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x)")
    return bytes(connection.serialize())


def image(encode: str) -> bytes:
    import tensorflow as tf

    return bytes(getattr(tf.io, encode)(np.zeros((9, 9, 3), np.uint8)).numpy())


def zipped() -> bytes:
    return saved(lambda file: zipfile.ZipFile(file, "w").writestr("a", TEXT))


def v7_tar(members: list[tuple[str, bytes]]) -> bytes:
    """As ``tar --format=v7`` writes it: without ``ustar``."""
    data = bytearray(tar_of(members))
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        offsets = [info.offset for info in tar]
    for offset in offsets:
        block = data[offset : offset + 512]
        block[257:512] = bytes(255)
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        data[offset : offset + 512] = block
    return bytes(data)


def binpack(*chunks: int) -> bytes:
    return b"".join(b"BINP" + struct.pack("<I", size) + bytes(size) for size in chunks)


RIEGELI = bytes.fromhex("83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9") + bytes(64)
VIRIFORMAT = bytes.fromhex(  # the example of its README: five moves
    "ffff00000000ffff1642256100000000888888889ecaade940000100000002000c070a0034091400c309e2ff3c0dff7f2709ff7f00000000"
)
MAKERS: dict[str, Callable[[], bytes]] = {
    "tfrecord": lambda: frames(payloads_of(100)),
    "gzip": lambda: gzip.compress(gzip.compress(TEXT)),
    "zlib": lambda: zlib.compress(frames(random_payloads(99))),
    "zstd": lambda: zstd(TEXT),
    "xz": lambda: lzma.compress(TEXT),
    "bzip2": lambda: bz2.compress(TEXT),
    "lz4": lambda: pa.compress(TEXT, "lz4", asbytes=True),
    "snappy": lambda: b"\xff\x06\0\0sNaPpY" + bytes(100),
    "7z": lambda: b"7z\xbc\xaf\x27\x1c\0\4" + bytes(100),
    "rar": lambda: b"Rar!\x1a\x07\x01\0" + bytes(100),
    "zip": zipped,
    "tar": lambda: v7_tar([("a", TEXT)]),
    "parquet": lambda: table(parquet),
    "orc": lambda: table(orc),
    "arrow": lambda: table(feather),
    "avro": lambda: b"Obj\x01\x04\x16avro.schema\x0c" + TEXT,
    "hdf5": hdf5,
    "matlab": lambda: saved(matlab),
    "npy": lambda: saved(lambda file: np.save(file, np.arange(9))),
    "sqlite": sqlite,
    "riegeli": lambda: RIEGELI,
    "pickle": lambda: pickle.dumps(np.arange(99)),
    "binpack": lambda: binpack(1000, 7),
    "viriformat": lambda: VIRIFORMAT,
    "png": lambda: image("encode_png"),
    "jpeg": lambda: image("encode_jpeg"),
    "pdf": lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + bytes(99),
    "lfs": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "html": lambda: PAGE,
    "xml": lambda: b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>\n',
    "text": lambda: TEXT,
}
READ_AS_TFRECORD = {"tfrecord", "zlib"}
READ_AS_FIXED = {"zstd", "tar"}


def test_there_is_a_file_of_each_kind():
    assert list(MAKERS) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_recognized(kind: str):
    data = MAKERS[kind]()
    assert kind_of(Content.of_bytes(data, is_whole=True)) == kind
    assert kind_of(Content.of_bytes(data[: len(data) // 2 * 2], is_whole=True), BYTES) in (kind, "")


def test_a_binpack_that_is_cut_in_its_first_chunk_is_one():
    assert kind_of(Content.of_bytes(binpack(1000)[:80], is_whole=True), NUMBERS) == "binpack"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in READ_AS_TFRECORD])
def test_it_is_refused_where_tfrecords_are_expected(kind: str, tmp_path: Path):
    if kind == "gzip":  # one in another
        check_refusal(tmp_path, MAKERS[kind](), "gzip", None, "compressed with gzip")
        return
    check_refusal(tmp_path, MAKERS[kind](), kind, None)
    check_refusal(tmp_path, gzip.compress(MAKERS[kind]()), kind, None, "compressed with gzip")
    check_refusal(tmp_path, zlib.compress(MAKERS[kind]()), kind, None, "compressed with zlib")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in READ_AS_FIXED])
def test_it_is_refused_where_records_of_a_fixed_size_are_expected(kind: str, tmp_path: Path):
    """Their size divides that of every file."""
    data, records = MAKERS[kind](), BYTES
    if kind == "text":
        data, records = data[: len(data) // 4 * 4], NUMBERS
    if kind not in ("gzip", "npy", "parquet", "arrow"):  # these are read, as they are
        check_refusal(tmp_path, data, kind, records)
        check_refusal(tmp_path, zstd(data), kind, records, "compressed with zstd")
    check_refusal(tmp_path, data if kind == "gzip" else gzip.compress(data), kind, records, "compressed with gzip")


def check_refusal(folder: Path, data: bytes, kind: str, records: Any, inside: str = "") -> None:
    file = make_shard(folder / "a", data)
    with pytest.raises(ShardFormatError) as caught:
        build_index(file, 10) if records is None else build_fixed_index(file, records, 10)
    named = f"{KINDS[kind].what}, {inside}" if inside else KINDS[kind].what
    assert str(caught.value).count("\n") == 1, "a sentence, and what to do"
    assert caught.value.message.startswith(f"{file.uri} {'holds' if inside else 'is'} {named}, and not ")
    assert caught.value.hint.startswith(KINDS[kind].cure) and "on_corrupt" not in caught.value.hint
    damage = caught.value.damage
    assert damage is not None and (damage.shard, damage.record, damage.lost_bytes) == (file.uri, 0, -1)


def test_what_tar_and_lz4_write_themselves(tmp_path: Path):
    """And files that Python has no library for, cut behind their first bytes."""
    (tmp_path / "README.md").write_bytes(TEXT)
    for command, kind in (
        (["tar", "--format=v7", "-cf", "a", "README.md"], "tar"),
        (["lz4", "-q", "README.md", "a"], "lz4"),
        (["bzip2", "-kc", "README.md"], "bzip2"),
    ):
        (tmp_path / "a").unlink(missing_ok=True)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        data = done.stdout or (tmp_path / "a").read_bytes()
        assert kind_of(Content.of_bytes(data, is_whole=True)) == kind
        assert kind_of(Content.of_bytes(data[:512], is_whole=True)) == kind


# ------------------------------------------------------------------------------------- what is read all the same


def test_a_tar_without_ustar_is_read(tmp_path: Path):
    data = v7_tar([("0.gz", gzip.compress(bytes(7))), ("LICENSE", TEXT), ("1.gz", gzip.compress(bytes(9)))])
    index = build_fixed_index(make_shard(tmp_path / "a", data), BYTES, 10)
    assert (index.compression, index.counts.tolist(), index.damages) == ("tar", [7, 9], ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_may_be_as_long_as_another_kind_begins(tmp_path: Path, kind: str):
    """The CRC of the length says that it is one."""
    length = int.from_bytes((MAKERS[kind]() + bytes(8))[:8], "little")
    index = build_index(make_shard(tmp_path / "a", header(length) + bytes(300)), 10)
    assert index.compression == "none"


def test_the_first_bytes_of_a_kind_are_no_proof():
    """Of each kind, three of them and random bytes: these are records."""
    rng = np.random.default_rng(1)
    for kind, make in MAKERS.items():
        front = make()[:3]
        for tail in rng.integers(0, 256, (2000, 600), np.uint8):
            assert not kind_of(Content.of_bytes(front + tail.tobytes(), is_whole=True), NUMBERS), kind


@pytest.mark.parametrize("dtype", ["S16", ("u1", (16,)), ("S1", (16,))])
def test_records_may_be_text(tmp_path: Path, dtype: Any):
    records = loaderd.FixedRecords([("line", dtype)])
    data = TEXT.replace(b"\xc3\xbc", b"")[: len(TEXT) // 32 * 16]
    index = build_fixed_index(make_shard(tmp_path / "a", data), records, 100)
    assert index.num_records == len(data) // 16 and not index.damages


def test_text_in_front_of_numbers_is_no_proof():
    """Here the first 64 KiB of each record are text; it takes the numbers behind them to tell."""
    records = loaderd.FixedRecords([("text", "S65536"), ("number", "<f4", (8,))])
    text = (TEXT * 50)[:65536]
    for numbers, found in ((np.arange(8, dtype="<f4").tobytes(), ""), (b"12345678" * 4, "text")):
        assert kind_of(Content.of_bytes((text + numbers) * 2, is_whole=True), records) == found


def test_too_little_text_is_no_proof(tmp_path: Path):
    for data in (b"1234" * 7, b"1234" * 8 + b"\0\0\0\0"):
        assert build_fixed_index(make_shard(tmp_path / "a", data), NUMBERS, 10).num_records == len(data) // 4


# ------------------------------------------------------------------------------------- as a loader's user sees it


def test_of_what_is_no_tfrecord_file_a_few_bytes_of_text_are_proof(tmp_path: Path):
    """A README of 8 bytes was a damaged record. A TFRecord file begins with zeros among its first 8 bytes."""
    with pytest.raises(ShardFormatError, match="is text, and not a TFRecord file"):
        build_index(make_shard(tmp_path / "README", b"# Games\n"), 10)
    for cut in range(1, 40):
        assert kind_of(Content.of_bytes(frames([b"x" * 30])[:cut], is_whole=True)) != "text"


@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record", "skip_shard"])
def test_a_loader_refuses_it_whatever_on_corrupt_says(on_corrupt: Any, tmp_path: Path):
    """96 TFRecords of 7 and 1 bytes were 144 "records" of 16 bytes."""
    (tmp_path / "a.bin").write_bytes(np.arange(400, dtype="<f4").tobytes())
    (tmp_path / "b.bin").write_bytes(frames([bytes(7), bytes(9)] * 48))
    schema = loaderd.Schema(loaderd.FixedRecords([("x", "<f4", (4,))]), {"x": loaderd.Array("x")})
    with pytest.raises(ShardFormatError, match=r"b\.bin is a TFRecord file, and not records of 16 bytes\nGive a sch"):
        loaderd.Loader(tmp_path / "*.bin", schema, batch_size=2, workers=1, on_corrupt=on_corrupt)
    features = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
    (tmp_path / "README.md").write_bytes(TEXT)
    with pytest.raises(ShardFormatError, match=r"README\.md is text, and not a TFRecord file.*\nIf it is no shard"):
        loaderd.Loader([tmp_path / "b.bin", tmp_path / "README.md"], features, batch_size=2, on_corrupt=on_corrupt)


# ------------------------------------------------------------------------------------- records of another version


def versions(version: int, size_bytes: int, count: int) -> bytes:
    """Records as those of Leela Chess Zero begin."""
    rows = np.random.default_rng(version).integers(0, 256, (count, size_bytes), np.uint8)
    rows[:, :8] = np.frombuffer(struct.pack("<II", version, 1), np.uint8)
    return rows.tobytes()


def lc0() -> loaderd.FixedRecords:
    records = loaderd.schemas.lc0().records
    assert records is not None
    return records


@pytest.mark.parametrize("count", [2, 50])
@pytest.mark.parametrize(("version", "size_bytes"), [(8, 8400), (5, 8308), (4, 8292), (3, 8276)])
def test_versions_and_sizes_are_named(version: int, size_bytes: int, count: int, tmp_path: Path):
    data = versions(version, size_bytes, count)
    said = (
        rf"holds records of {size_bytes:,} bytes with version {version}, input_format 1(, compressed with gzip)?, "
        "and not records of 8,356 bytes with version 6 or 8,396 bytes with version 7, input_format 1\nGive the files"
    )
    games = tar_of([("0.gz", gzip.compress(data)), ("LICENSE", TEXT)])
    for shard in (data, gzip.compress(data), games):
        with pytest.raises(ShardFormatError, match=said):
            build_fixed_index(make_shard(tmp_path / "a", shard), lc0(), 1000)
    mixed = tar_of([("0.gz", gzip.compress(versions(6, 8356, 3))), ("1.gz", gzip.compress(data))])
    index = build_fixed_index(make_shard(tmp_path / "a", mixed), lc0(), 1000)
    assert index.num_records == 3 and "in '1.gz', the member at byte" in index.damages[0].found
    assert index.damages[0].other_records == count


def test_damage_is_not_taken_for_another_version(tmp_path: Path):
    good = bytearray(versions(6, 8356, 4))
    zeros = bytes(8356) + bytes(good[8356:-1])
    noise = np.random.default_rng(0).bytes(30_000)
    other_first = versions(5, 8356, 1) + bytes(good[8356:-1])
    for data in (zeros, bytes(30_000), b"\xff" * 30_000, noise, other_first, bytes(good[:-1])):
        index = build_fixed_index(make_shard(tmp_path / "a", data), lc0(), 1000)
        assert index.num_records == 3 and len(index.damages) == 1
    of_format_2 = versions(6, 8356, 4).replace(struct.pack("<II", 6, 1), struct.pack("<II", 6, 2))
    same_size = make_shard(tmp_path / "a", of_format_2)
    assert build_fixed_index(same_size, lc0(), 1000).num_records == 4, "each is a mismatch, which its batch names"


def test_a_checksum_with_a_space_in_it_is_none():
    assert not is_tar_header(b"a" * 148 + b"1 2 3 \0 " + b"a" * 356)
