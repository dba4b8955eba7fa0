"""The index and the reading of its blocks: what is healthy is found once, what is damaged is named."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaderd.errors import Damage, NoShardsError, OptionError, ShardReadError
from loaderd.shards import crc, files
from loaderd.shards.blocks import Block, BlockReader
from loaderd.shards.compression import detect_compression
from loaderd.shards.index import ANCHOR_RECORDS, ShardIndex, build_index, decode_index
from loaderd.shards.index_cache import IndexCache

COMPRESS = {"none": bytes, "gzip": gzip.compress, "zlib": zlib.compress}


def frame(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", crc.masked_crc(length)) + payload + struct.pack("<I", crc.masked_crc(payload))


def payloads_of(count: int) -> list[bytes]:
    return [struct.pack("<I", n) * (1 + n % 7) for n in range(count)]


def make(path: Path, data: bytes) -> files.ShardFile:
    path.write_bytes(data)
    (file,) = files.list_shards(path)
    return file


def blocks_of(index: ShardIndex, shard: int = 0) -> list[Block]:
    blocks, anchor = [], 0
    for offset, size, count, first in zip(
        index.offsets, index.num_bytes, index.counts, index.first_records, strict=True
    ):
        num_anchors = -(-int(count) // ANCHOR_RECORDS) if index.compression == "none" else 0
        anchors = index.anchors[anchor : anchor + num_anchors]
        anchor += num_anchors
        blocks.append(Block(shard, int(offset), int(size), int(count), int(first), anchors.tobytes()))
    assert anchor == len(index.anchors)
    return blocks


def read_all(reader: BlockReader, block: Block) -> tuple[dict[int, bytes], list[Damage]]:
    """Payloads by record number of the shard, and damage."""
    records: dict[int, bytes] = {}
    damages = []
    for found in reader.read(block, 0, block.count):
        if isinstance(found, Damage):
            damages.append(found)
            continue
        piece = found.piece
        for i, (start, length) in enumerate(zip(piece.payload_starts, piece.payload_lengths, strict=True)):
            number = found.first + i
            if i not in piece.bad and number < block.count:
                records[block.first_record + number] = piece.buffer[start : start + length].tobytes()
    return records, damages


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 300),
    block_records=st.integers(1, 90),
    compression=st.sampled_from(list(COMPRESS)),
    damaged=st.sets(st.integers(0, 299), max_size=5),
)
def test_blocks_hold_the_healthy_records(
    tmp_path: Path, count: int, block_records: int, compression: str, damaged: set[int]
):
    payloads = payloads_of(count)
    frames = [bytearray(frame(payload)) for payload in payloads]
    damaged = {number for number in damaged if number < count}
    for number in damaged:
        frames[number][13] ^= 1
    file = make(tmp_path / "misleading.gz", COMPRESS[compression](b"".join(frames)))
    index = decode_index(build_index(file, block_records).encode())
    assert index.compression == (compression if count or compression != "none" else "none")
    assert [damage.record for damage in index.damages] == sorted(damaged)
    assert index.num_records == count - len(damaged)
    reader = BlockReader([file], [index.compression])
    records: dict[int, bytes] = {}
    for block in blocks_of(index):
        assert compression != "none" or block.count <= block_records
        healthy, damages = read_all(reader, block)
        assert not damages and not records.keys() & healthy.keys()
        records |= healthy
    assert records == {n: p for n, p in enumerate(payloads) if n not in damaged}
    reader.close()


def test_blocks_of_several_shards_are_read_together(tmp_path: Path):
    listed, indexes, expected = [], [], []
    for shard in range(3):
        payloads = [bytes([shard]) * 3 + p for p in payloads_of(150 + shard)]
        listed.append(make(tmp_path / f"{shard}", b"".join(map(frame, payloads))))
        indexes.append(build_index(listed[-1], 40))
        expected.append(payloads)
    reader = BlockReader(listed, ["none"] * 3)
    chosen = [blocks_of(indexes[shard], shard)[number] for shard, number in ((2, 3), (0, 0), (1, 1), (0, 3))]
    run = reader.read_together(chosen)
    assert run is not None
    buffer, ends = run
    found = [buffer[s + 12 : e - 4].tobytes() for s, e in itertools.pairwise(ends)]
    assert found == [p for b in chosen for p in expected[b.shard][b.first_record : b.first_record + b.count]]


@pytest.mark.parametrize("where", ["length", "length crc", "data", "data crc"])
def test_damage_after_the_index_costs_its_record(tmp_path: Path, where: str):
    payloads = payloads_of(200)
    data = bytearray(b"".join(map(frame, payloads)))
    file = make(tmp_path / "a", data)
    index = build_index(file, 50)
    ends = np.cumsum([0, *[len(p) + 16 for p in payloads]])
    hit = 77
    data[ends[hit] + {"length": 1, "length crc": 9, "data": 13, "data crc": len(payloads[hit]) + 13}[where]] ^= 2
    Path(file.uri).write_bytes(data)
    os.utime(file.uri, ns=(file.mtime_ns, file.mtime_ns))
    reader = BlockReader([file], ["none"])
    assert reader.read_together(blocks_of(index)) is None
    records: dict[int, bytes] = {}
    damages = []
    for block in blocks_of(index):
        healthy, found = read_all(reader, block)
        records |= healthy
        damages += found
    assert records == {n: p for n, p in enumerate(payloads) if n != hit}
    assert [damage.record for damage in damages] == [hit]


def test_a_stretch_that_is_overwritten_costs_no_more_than_itself(tmp_path: Path):
    payloads = payloads_of(100)
    data = bytearray(b"".join(map(frame, payloads)))
    file = make(tmp_path / "a", data)
    index = build_index(file, 100)
    ends = np.cumsum([0, *[len(p) + 16 for p in payloads]])
    data[ends[30] + 3 : ends[40] - 2] = b"\xff" * int(ends[40] - 2 - ends[30] - 3)
    Path(file.uri).write_bytes(data)
    os.utime(file.uri, ns=(file.mtime_ns, file.mtime_ns))
    (block,) = blocks_of(index)
    records, damages = read_all(BlockReader([file], ["none"]), block)
    assert records == {n: p for n, p in enumerate(payloads) if not 30 <= n < 40}
    assert [damage.record for damage in damages] == list(range(30, 40))


def test_a_file_that_changed_is_another_file(tmp_path: Path):
    file = make(tmp_path / "a", b"".join(map(frame, payloads_of(100))))
    (block,) = blocks_of(build_index(file, 100))
    reader = BlockReader([file], ["none"])
    assert len(read_all(reader, block)[0]) == 100
    Path(file.uri).write_bytes(b"".join(map(frame, payloads_of(90))))
    with pytest.raises(ShardReadError, match="changed while it was in use"):
        read_all(reader, block)
    with pytest.raises(ShardReadError, match="changed while it was in use"):
        files.open_shard(file)
    os.unlink(file.uri)
    with pytest.raises(ShardReadError, match="No such file"):
        files.open_shard(file)


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_compressed_stream_that_is_cut_or_damaged(tmp_path: Path, compression: str):
    payloads = [np.random.default_rng(n).bytes(50) for n in range(300)]
    whole = COMPRESS[compression](b"".join(map(frame, payloads)))
    for cut in range(20, len(whole), 997):
        index = build_index(make(tmp_path / "cut", whole[:cut]), 50)
        assert index.compression == compression and index.damages, cut
        assert index.damages[-1].expected.startswith("more compressed data")
        reader = BlockReader([index.file], [index.compression])
        for block in blocks_of(index):
            records, damages = read_all(reader, block)
            assert not damages and records == dict(enumerate(payloads[: index.num_records]))
        reader.close()
        flipped = bytearray(whole)
        flipped[cut] ^= 0x55
        index = build_index(make(tmp_path / "flipped", bytes(flipped)), 50)
        assert index.damages
        for block in blocks_of(index):
            records, _ = read_all(BlockReader([index.file], [index.compression]), block)
            assert all(payloads[number] == payload for number, payload in records.items())


def test_members_of_gzip_that_follow_each_other(tmp_path: Path):
    payloads = payloads_of(100)
    parts = [b"".join(map(frame, payloads))[i : i + 333] for i in range(0, 10_000, 333)]
    index = build_index(make(tmp_path / "a", b"".join(gzip.compress(part) for part in parts if part)), 50)
    assert index.num_records == 100 and not index.damages


def test_a_plain_file_that_looks_like_zlib(tmp_path: Path):
    payload = b"x" * 0x9C78  # its length begins with the bytes 78 9c
    file = make(tmp_path / "a.z", frame(payload))
    opened = files.open_shard(file)
    assert detect_compression(opened) == "none"
    opened.close()
    assert build_index(file, 10).num_records == 1


def test_a_file_that_is_no_shard(tmp_path: Path):
    index = build_index(make(tmp_path / "a", b"not a TFRecord file at all, but some text"), 10)
    assert index.num_records == 0 and index.damages[0].record == 0


# --------------------------------------------------------------------------------------------- the cache


def test_the_cache_knows_a_file_by_size_time_and_block_size(tmp_path: Path):
    file = make(tmp_path / "a", b"".join(map(frame, payloads_of(10))))
    cache = IndexCache(str(tmp_path / "cache"), 4)
    assert cache.load(file) is None
    assert cache.store(build_index(file, 4)) is None
    found = cache.load(file)
    assert found is not None and found.counts.tolist() == [4, 4, 2]
    assert IndexCache(str(tmp_path / "cache"), 5).load(file) is None
    os.utime(file.uri, ns=(1, 1))
    assert cache.load(files.list_shards(file.uri)[0]) is None


def test_a_cached_index_that_is_damaged_is_made_again(tmp_path: Path):
    file = make(tmp_path / "a", b"".join(map(frame, payloads_of(10))))
    cache = IndexCache(str(tmp_path / "cache"), 4)
    cache.store(build_index(file, 4))
    path = cache.path_of(file)
    assert path is not None
    data = path.read_bytes()
    for broken in (b"", data[:-1], data[:20] + b"\x00" + data[21:], b"\x00" * 50):
        path.write_bytes(broken)
        assert cache.load(file) is None
        with pytest.raises(ValueError, match=r"CRC|version"):
            decode_index(broken)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = make(tmp_path / "a", frame(b"x"))
    monkeypatch.setenv("LOADERD_CACHE_DIR", str(tmp_path / "env"))
    beside = IndexCache("beside", 4).path_of(file)
    user = IndexCache("user", 4).path_of(file)
    assert beside is not None and beside.parent == tmp_path and beside.name.startswith(".a.")
    assert user is not None and user.is_relative_to(tmp_path / "env")
    assert IndexCache("none", 4).path_of(file) is None
    monkeypatch.delenv("LOADERD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    user = IndexCache("user", 4).path_of(file)
    assert user is not None and user.is_relative_to(tmp_path / "xdg" / "loaderd")


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    file = make(tmp_path / "a", frame(b"x"))
    (tmp_path / "occupied").write_text("a file, where a folder should be")
    error = IndexCache(str(tmp_path / "occupied"), 4).store(build_index(file, 4))
    assert isinstance(error, OSError)


# ------------------------------------------------------------------------------------------ naming files


def test_what_names_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b.rec", "a.rec", "c.txt"):
        (tmp_path / name).write_bytes(b"")

    def names(shards: object) -> list[str]:
        return [os.path.basename(file.uri) for file in files.list_shards(shards)]

    assert names(tmp_path / "b.rec") == names(str(tmp_path / "b.rec")) == ["b.rec"]
    assert names(f"{tmp_path}/*.rec") == ["a.rec", "b.rec"]
    assert names([tmp_path / "c.txt", f"{tmp_path}/*.rec"]) == ["c.txt", "a.rec", "b.rec"]
    assert names(f"file://{tmp_path}/b.rec") == ["b.rec"]
    monkeypatch.chdir(tmp_path)
    assert files.list_shards("b.rec")[0].uri == str(tmp_path / "b.rec")
    odd = tmp_path / "odd[1].rec"
    odd.write_bytes(b"")
    assert names(odd) == ["odd[1].rec"], "a file that exists is not a pattern"


def test_what_names_no_file(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"")
    for shards, error, text in (
        (tmp_path / "x", NoShardsError, "does not exist"),
        (f"{tmp_path}/*.x", NoShardsError, "matches no file"),
        (tmp_path, NoShardsError, "is a folder"),
        ([], NoShardsError, "at least one file"),
        ([5], OptionError, "a path, a glob, a URI"),
        ([tmp_path / "a", f"{tmp_path}/*"], OptionError, "twice"),
        ("nosuchscheme://bucket/key", ShardReadError, "nosuchscheme"),
    ):
        with pytest.raises(error, match=text):
            files.list_shards(shards)
