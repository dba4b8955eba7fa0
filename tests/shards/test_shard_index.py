"""The index of a shard: its blocks hold exactly the healthy records, and it survives being written down."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_bytes import (
    COMPRESS,
    blocks_of,
    frames,
    make_shard,
    payloads_of,
    random_payloads,
    read_blocks,
    starts_of,
    write_too_large,
)

from loaderd.errors import Damage, ShardReadError
from loaderd.shards import framing
from loaderd.shards import shard_index as index_module
from loaderd.shards.access import Access
from loaderd.shards.blocks import BlockReader
from loaderd.shards.compression import PlainStream
from loaderd.shards.crc import framed, masked_crc
from loaderd.shards.files import list_shards
from loaderd.shards.local_file import LocalFile
from loaderd.shards.shard_file import OpenFile, ShardFile
from loaderd.shards.shard_index import ANCHOR_RECORDS, ShardIndex, build_index, decode_index


def assert_equal(one: ShardIndex, other: ShardIndex) -> None:
    for field in fields(ShardIndex):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


damages_of_records = st.dictionaries(
    st.integers(0, 299), st.sampled_from(["length", "length crc", "data", "crc"]), max_size=6
)


@given(
    count=st.integers(0, 300),
    block_records=st.integers(1, 90),
    compression=st.sampled_from(list(COMPRESS)),
    damaged=damages_of_records,
)
def test_blocks_hold_the_healthy_records(
    tmp_path: Path, count: int, block_records: int, compression: str, damaged: dict[int, str]
):
    payloads = payloads_of(count)
    starts = starts_of(payloads)
    damaged = {number: where for number, where in damaged.items() if number < count}
    data = bytearray(frames(payloads))
    for number, where in damaged.items():
        at = {"length": 1, "length crc": 9, "data": 13, "crc": len(payloads[number]) + 13}[where]
        data[starts[number] + at] ^= 1
    file = make_shard(tmp_path / "misleading.gz", COMPRESS[compression](bytes(data)))
    index = build_index(file, block_records)
    assert (index.compression, index.file) == (compression, file)
    assert index.num_records == count - len(damaged)

    # A stretch with lost frames counts as one record: that is what the numbers behind it know.
    lost = [
        number
        for number in damaged
        if damaged[number].startswith("length") and number - 1 in damaged and damaged[number - 1].startswith("length")
    ]
    number_of = {number: number - sum(other <= number for other in lost) for number in range(count)}
    assert {damage.record for damage in index.damages} == {number_of[number] for number in damaged}
    places = {damage.record: damage.offset for damage in index.damages}
    assert all(places[number_of[n]] == starts[n] for n in damaged if n not in lost)

    reader = BlockReader([file], [index.compression])
    records, damages = read_blocks(reader, blocks_of(index))
    reader.close()
    assert not damages
    assert records == {number_of[n]: payload for n, payload in enumerate(payloads) if n not in damaged}

    for block in blocks_of(index):
        original = starts.index(block.offset)
        assert number_of[original] == block.first_record and block.num_records > 0
        assert block.offset + block.num_bytes == starts[original + block.num_records]
        if compression == "none":
            assert block.num_records <= block_records
            anchors = np.frombuffer(block.anchors, dtype="<u4")
            expected = starts[original : original + block.num_records : ANCHOR_RECORDS]
            assert (anchors + block.offset).tolist() == expected
    for block, following in itertools.pairwise(blocks_of(index)):
        touches = block.first_record + block.num_records == following.first_record
        assert not touches or (compression == "none" and block.num_records == block_records), (
            "blocks are never too short"
        )


def test_a_block_ends_where_it_is_large(tmp_path: Path):
    payloads = random_payloads(30, 1 << 20)
    index = build_index(make_shard(tmp_path / "a", frames(payloads)), 4096)
    assert index.num_records == 30 and len(index.counts) >= 3
    assert (index.num_bytes < 10 << 20).all()
    reader = BlockReader([index.file], ["none"])
    assert read_blocks(reader, blocks_of(index)) == (dict(enumerate(payloads)), [])
    reader.close()


def test_the_order_of_blocks_does_not_depend_on_how_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The plan is made of blocks: another file system must not shuffle in another way."""
    file = make_shard(tmp_path / "a", frames(random_payloads(400, 30_000)))
    whole = build_index(file, 1000)
    assert len(whole.counts) == 2, "cut where it is large"
    read_into = PlainStream.read_into
    monkeypatch.setattr(PlainStream, "read_into", lambda stream, view: read_into(stream, view[:100_003]))
    assert_equal(build_index(file, 1000), whole)


@pytest.mark.parametrize("compression", list(COMPRESS))
@pytest.mark.parametrize("count", [0, 1, 100])
def test_encode_and_back(tmp_path: Path, compression: str, count: int):
    data = bytearray(frames(payloads_of(count)))
    if count > 1:
        data[starts_of(payloads_of(count))[50] + 14] ^= 1
    index = build_index(make_shard(tmp_path / "a", COMPRESS[compression](bytes(data))), 7)
    assert len(index.damages) == (count > 1)
    assert_equal(decode_index(index.encode()), index)
    assert decode_index(index.encode()).encode() == index.encode()


def test_damages_take_no_more_bytes_than_is_said(tmp_path: Path):
    large, texts = (1 << 62), ("", "a", "ü" * 300, "\udcff" * 80)
    damages = tuple(Damage(shard, large, large, text, text, large) for shard in texts for text in texts)
    index = build_index(make_shard(tmp_path / "a", frames(payloads_of(20))), 7)
    one = [replace(index, damages=(damage,)) for damage in damages]
    for each in (*one, replace(index, damages=damages)):
        taken = len(each.encode()) - len(index.encode())
        assert taken <= each.damage_bytes <= taken + 30 * len(each.damages)


def test_damaged_bytes_are_no_index(tmp_path: Path):
    encoded = build_index(make_shard(tmp_path / "a", frames(payloads_of(20))), 7).encode()
    for place, change in itertools.product(range(len(encoded)), (1, 0x80, 0xFF)):
        damaged = bytearray(encoded)
        damaged[place] ^= change
        with pytest.raises(ValueError, match="CRC"):
            decode_index(bytes(damaged))
    for stop in range(len(encoded)):
        with pytest.raises(ValueError, match="CRC"):
            decode_index(encoded[:stop])
    with pytest.raises(ValueError, match="CRC"):
        decode_index(encoded + b"\x00")


def test_another_version_is_no_index(tmp_path: Path):
    encoded = build_index(make_shard(tmp_path / "a", frames(payloads_of(20))), 7).encode()
    wire = msgpack.unpackb(encoded[:-4])
    for other in ({"version": wire["version"] + 1}, {**wire, "version": 0}):
        body = msgpack.packb(other)
        with pytest.raises(ValueError, match="version"):
            decode_index(body + masked_crc(body).to_bytes(4, "little"))


def test_a_file_that_changes_while_it_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = make_shard(tmp_path / "a", frames(payloads_of(20)))

    def open_and_append(listed: ShardFile, access: Access) -> OpenFile:
        opened = open_shard(listed, access)
        with open(listed.uri, "ab") as shard:
            shard.write(framed(b"one more"))
        return opened

    open_shard = index_module.open_shard
    monkeypatch.setattr(index_module, "open_shard", open_and_append)
    with pytest.raises(ShardReadError, match="changed while it was in use"):
        build_index(file, 7)


def test_damage_is_named(tmp_path: Path):
    payloads = payloads_of(5)
    starts = starts_of(payloads)
    data = bytearray(frames(payloads))
    data[starts[2] + 12] ^= 1
    index = build_index(make_shard(tmp_path / "a", bytes(data) + b"x"), 7)
    first, second = index.damages
    assert isinstance(first, Damage)
    assert (first.shard, first.record, first.offset) == (index.file.uri, 2, starts[2])
    assert first.lost_bytes == starts[3] - starts[2] and "CRC32C" in first.expected
    assert (second.record, second.offset, second.found) == (5, starts[5], "1 bytes")


@pytest.mark.parametrize("front", [[], payloads_of(40)])
def test_a_record_that_is_too_large_is_stepped_over(
    front: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At once: of its gigabyte, next to nothing is read."""
    write_too_large(tmp_path / "a", front, payloads_of(5))
    (file,) = list_shards(tmp_path / "a")
    read_bytes, read_at = 0, LocalFile.read_at

    def read(opened: LocalFile, offset: int, view: memoryview) -> int:
        nonlocal read_bytes
        read_bytes += len(view)
        return read_at(opened, offset, view)

    monkeypatch.setattr(LocalFile, "read_at", read)
    index = build_index(file, 7)
    (damage,) = index.damages
    assert damage.expected == framing.TOO_LARGE == "a record of at most 1073741824 bytes"
    assert damage.found == "a whole one of 1073741825 bytes" and damage.record == len(front)
    assert damage.lost_bytes == 1073741825 + 16 and index.num_records == len(front) + 5
    assert read_bytes < 8 << 20


def test_the_digest_is_of_what_the_records_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    payloads = random_payloads(3000, 700)

    def digest_of(payloads: list[bytes], compress: str = "none", block_records: int = 100) -> int:
        return build_index(make_shard(tmp_path / "a", COMPRESS[compress](frames(payloads))), block_records).digest

    digest = digest_of(payloads)
    assert 0 <= digest < 1 << 32 and digest_of([]) == 0
    assert {digest_of(payloads, compress) for compress in COMPRESS} == {digest}
    assert digest_of(payloads, block_records=7) == digest
    changed = bytes([payloads[2000][0] ^ 1]) + payloads[2000][1:]
    others = [[*payloads[:2000], changed, *payloads[2001:]], payloads[:-1], [*payloads[1:], payloads[0]]]
    assert len({digest, *map(digest_of, others)}) == 4
    read_into = PlainStream.read_into
    monkeypatch.setattr(PlainStream, "read_into", lambda stream, view: read_into(stream, view[:100_003]))
    assert digest_of(payloads) == digest, "however it is read"
