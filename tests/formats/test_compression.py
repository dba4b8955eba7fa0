"""GZIP and ZLIB: told by content, read as one stream, and delivered up to the byte where they are damaged."""

from __future__ import annotations

import contextlib
import gzip
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage
from loaderd.formats.compression import (
    InflatedStream,
    detect_compression,
    most_record_bytes,
    open_stream,
)
from loaderd.formats.inflate import read_at_of
from loaderd.formats.shard_index import build_index
from loaderd.kernels.crc import framed
from loaderd.storage.files import open_shard
from tests.formats.shard_bytes import COMPRESS, frames, make_shard, payloads_of, random_payloads, starts_of
from tests.helpers.record_bytes import header


def detected(path: Path, data: bytes) -> str:
    opened = open_shard(make_shard(path, data))
    try:
        return detect_compression(str(path), opened.read_at, path.stat().st_size)
    finally:
        opened.close()


def inflated(path: Path, data: bytes, most: int = 1 << 20) -> tuple[bytes, Damage | None]:
    """All that a stream gives, at most ``most`` bytes at a time, and how it ended."""
    opened = open_shard(make_shard(path, data))
    try:
        compression = detect_compression("a", opened.read_at, path.stat().st_size)
        stream = open_stream(str(path), opened.read_at, compression)
        view = memoryview(bytearray(most))
        found = bytearray()
        while got := stream.read_into(view):
            found += view[:got]
        assert stream.read_into(view) == 0, "the end stays the end"
        return bytes(found), stream.damage
    finally:
        opened.close()


# ----------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("compression", list(COMPRESS))
def test_what_tensorflow_wrote(tmp_path: Path, compression: str):
    import tensorflow as tf

    payloads = payloads_of(1000)
    path = tmp_path / "a.gz"  # the name says nothing
    options = None if compression == "none" else compression.upper()
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for payload in payloads:
            writer.write(payload)
    assert detected(path, path.read_bytes()) == compression
    assert inflated(path, path.read_bytes()) == (frames(payloads), None)


@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_every_level_is_told(tmp_path: Path, level: int):
    for payloads in ([], [b""], [bytes(1000)], payloads_of(50), random_payloads(50)):
        data = frames(payloads)
        assert detected(tmp_path / "a", zlib.compress(data, level)) == "zlib"
        assert detected(tmp_path / "a", gzip.compress(data, level, mtime=0)) == "gzip"
    flushed = zlib.compressobj(level)
    data = flushed.flush(zlib.Z_SYNC_FLUSH) + flushed.compress(framed(b"x")) + flushed.flush()
    assert detected(tmp_path / "a", data) == "zlib"


@pytest.mark.parametrize("length", [0x9C78, 0x0178, 248, 0x8B1F, 0x088B1F])
def test_a_plain_file_whose_length_looks_like_a_magic(tmp_path: Path, length: int):
    data = bytearray(frames([b"x" * length, b"behind"]))
    index = build_index(make_shard(tmp_path / "a.z", bytes(data)), 10)
    assert (index.compression, index.num_records) == ("none", 2)
    data[8] ^= 1  # now the CRC does not speak for it any more
    if length != 0x088B1F:  # where GZIP has a time that nobody sets, it has the zeros of a length too
        index = build_index(make_shard(tmp_path / "a.z", bytes(data)), 10)
        assert (index.compression, index.num_records) == ("none", 1)
        assert [damage.record for damage in index.damages] == [0]


@pytest.mark.parametrize("data", [b"", b"\x1f", b"\x1f\x8b", b"\x78", b"\x78\x9c", b"\x78\x9c\x03\x00\x00", b"text"])
def test_files_too_short_to_be_anything(tmp_path: Path, data: bytes):
    index = build_index(make_shard(tmp_path / "a", data), 10)
    assert index.num_records == 0
    assert [damage.record for damage in index.damages] == [0][: len(data)]


# ------------------------------------------------------------------------------------------------ as a stream


@given(
    compression=st.sampled_from(["none", "gzip", "zlib"]),
    most=st.sampled_from([1, 3, 100, 1000, 1 << 20]),
    parts=st.lists(st.binary(max_size=50).map(lambda part: part * 20), min_size=1, max_size=4),
)
def test_any_way_of_reading_gives_the_same(tmp_path: Path, compression: str, most: int, parts: list[bytes]):
    start = framed(b"so that it is told")
    data = COMPRESS[compression](start + parts[0]) + b"".join(COMPRESS[compression](part) for part in parts[1:])
    assert inflated(tmp_path / "a", data, most) == (start + b"".join(parts), None)


@pytest.mark.parametrize("compression", ["none", "gzip", "zlib"])
def test_skip(tmp_path: Path, compression: str):
    data = frames(random_payloads(20_000, 30))
    opened = open_shard(make_shard(tmp_path / "a", COMPRESS[compression](data)))
    view = memoryview(bytearray(100))
    for offset in (0, 1, 299_999, len(data) - 1, len(data), len(data) + 1):
        stream = open_stream("a", opened.read_at, detect_compression("a", opened.read_at, len(data)))
        assert isinstance(stream, InflatedStream) == (compression != "none")
        stream.skip(offset)
        got = stream.read_into(view)
        assert view[:got] == data[offset : offset + got] and (got > 0) == (offset < len(data))
    opened.close()


def test_reading_is_told_where_nothing_comes_of_it():
    data = memoryview(gzip.compress(b"") * 50_000)
    told: list[int] = []
    stream = open_stream("a", read_at_of(data), "gzip", told.append)
    assert not stream.read_into(memoryview(bytearray(100)))
    assert len(told) > 3 and told[-1] == len(data)


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_stream_that_is_cut_gives_all_that_is_in_front(tmp_path: Path, compression: str):
    payloads = random_payloads(300)
    starts = starts_of(payloads)
    data = frames(payloads)
    whole = COMPRESS[compression](data)
    for cut in [*range(12, len(whole), 661), *range(len(whole) - 9, len(whole))]:
        given_bytes, damage = inflated(tmp_path / "cut", whole[:cut])
        reference = zlib.decompressobj(31 if compression == "gzip" else 15)
        assert given_bytes == reference.decompress(whole[:cut]) == data[: len(given_bytes)]
        assert damage is not None and damage.offset == len(given_bytes)
        assert damage.expected.startswith("more compressed data") and damage.found == "the end of the file"
        index = build_index(make_shard(tmp_path / "cut", whole[:cut]), 50)
        assert index.compression == compression
        num_whole = sum(stop <= len(given_bytes) for stop in starts[1:])
        assert index.num_records == num_whole
        (named,) = index.damages  # the record that is cut, once, and why
        assert (named.record, named.offset, named.lost_bytes) == (num_whole, starts[num_whole], -1)
        assert named.expected == damage.expected


@pytest.mark.one_variant
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_stream_that_is_corrupt_gives_all_that_is_in_front(tmp_path: Path, compression: str):
    payloads = payloads_of(4000)
    starts = starts_of(payloads)
    data = frames(payloads)
    whole = COMPRESS[compression](data)
    for hit in [*range(10, len(whole), len(whole) // 20), *range(len(whole) - 8, len(whole))]:
        # Nothing that is in front of the byte depends on it.
        reference = zlib.decompressobj(31 if compression == "gzip" else 15)
        sure = reference.decompress(whole[:hit])
        corrupt = bytearray(whole)
        corrupt[hit] ^= 0x55
        given_bytes, damage = inflated(tmp_path / "a", bytes(corrupt))
        assert given_bytes[: len(sure)] == sure == data[: len(sure)]
        assert damage is not None and damage.offset == len(given_bytes)
        index = build_index(make_shard(tmp_path / "a", bytes(corrupt)), 50)
        num_sure = sum(stop <= len(sure) for stop in starts[1:])
        assert num_sure == 0 or (index.first_records[0] == 0 and index.counts[0] >= num_sure)
        assert index.damages and min(damage.record for damage in index.damages) >= num_sure
        assert len({damage.record for damage in index.damages}) == len(index.damages)


def test_the_end_of_a_stream_is_numbered_behind_the_records_in_front(tmp_path: Path):
    damaged = bytearray(frames(payloads_of(10)))
    damaged[starts_of(payloads_of(10))[4] + 13] ^= 1
    whole = gzip.compress(bytes(damaged))
    wrong_crc = bytearray(whole)
    wrong_crc[-5] ^= 1
    index = build_index(make_shard(tmp_path / "a", bytes(wrong_crc)), 50)
    assert index.num_records == 9
    assert [(damage.record, damage.lost_bytes >= 0) for damage in index.damages] == [(4, True), (10, False)]


@pytest.mark.parametrize("garbage", [b"\x00", b"x", b"garbage behind the end", bytes(5000)])
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_garbage_behind_the_end_costs_no_record(tmp_path: Path, compression: str, garbage: bytes):
    """Behind GZIP, zeros are padding."""
    data = COMPRESS[compression](frames(payloads_of(100))) + garbage
    index = build_index(make_shard(tmp_path / "a", data), 50)
    assert index.num_records == 100
    is_padding = compression == "gzip" and not any(garbage)
    assert [damage.record for damage in index.damages] == ([] if is_padding else [100])


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
@pytest.mark.parametrize("most", [1, 51, 1000, 1 << 20])
def test_all_that_is_in_front_of_damage_comes_whatever_is_read_at_a_time(tmp_path: Path, compression: str, most: int):
    """One byte of compressed data may hold 258, and an inflater that raises keeps them."""
    data = frames([bytes(1000), b"x" * 500, *payloads_of(20)])
    whole = COMPRESS[compression](data)
    for hit in range(10, len(whole)):
        corrupt = bytearray(whole)
        corrupt[hit] ^= 0x41
        expected, reference = bytearray(), zlib.decompressobj(31 if compression == "gzip" else 15)
        with contextlib.suppress(zlib.error):
            for byte in corrupt:
                expected += reference.decompress(bytes([byte]))
        given_bytes, damage = inflated(tmp_path / "a", bytes(corrupt), most)
        assert given_bytes == expected and (damage is not None) == (not reference.eof)


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_record_of_a_small_compressed_file_is_not_large(compression: str, tmp_path: Path):
    """It would be in memory whole: up to 1 GiB, of a file of 1 MB."""
    data = framed(b"x") + header(300 << 20) + bytes(4 << 20) + framed(b"y")
    file = make_shard(tmp_path / "a", COMPRESS[compression](data))
    tracemalloc.start()
    try:
        index = build_index(file, 50)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 << 20
    (damage,) = index.damages
    assert (damage.record, damage.found, index.num_records) == (1, f"{300 << 20}", 2)
    assert damage.expected == f"a length of at most {64 << 20} bytes"
    assert most_record_bytes("gzip", 5 << 20) == 320 << 20 and most_record_bytes("gzip", 1 << 40) == 1 << 30
    assert most_record_bytes("none", 100) == 1 << 30


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "data", [bytes(40 << 20), header(1 << 60) + bytes(40 << 20), framed(b"x") + b"\xff" * (40 << 20)]
)
def test_a_bomb_takes_no_more_memory_than_any_other_file(tmp_path: Path, data: bytes):
    """40 MiB in 40 KB."""
    file = make_shard(tmp_path / "a", gzip.compress(data, 9))
    tracemalloc.start()
    try:
        index = build_index(file, 50)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 << 20
    assert index.damages and sum(damage.lost_bytes for damage in index.damages) >= 40 << 20
