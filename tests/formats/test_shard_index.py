"""The index of a shard: its blocks hold exactly the healthy records, and it survives being written down."""

from __future__ import annotations

import gzip
import itertools
import os
import random
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage, ShardReadError
from loaderd.formats import framing
from loaderd.formats import shard_index as index_module
from loaderd.formats.blocks import BlockReader
from loaderd.formats.compression import ByteStream
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.indexer import make_indexes
from loaderd.formats.restart_points import RestartPoints
from loaderd.formats.shard_index import (
    ANCHOR_RECORDS,
    ShardIndex,
    build_index,
    build_indexes,
    decode_indexes,
    encode_indexes,
)
from loaderd.kernels.crc import framed
from loaderd.storage.access import Access
from loaderd.storage.files import OpenFile, list_shards
from loaderd.storage.local_file import LocalFile
from loaderd.storage.shard_file import ShardFile
from tests.formats.shard_bytes import (
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
from tests.helpers.evil_tars import header as tar_header
from tests.helpers.fixed_files import RECORDS


def assert_equal(one: ShardIndex, other: ShardIndex) -> None:
    for field in fields(ShardIndex):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, RestartPoints):
            assert mine.to_wire() == theirs.to_wire()
        elif isinstance(mine, np.ndarray):
            assert mine.dtype.kind == "u" and np.array_equal(mine, theirs), field.name
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
    read_into = ByteStream.read_into
    monkeypatch.setattr(ByteStream, "read_into", lambda stream, view: read_into(stream, view[:100_003]))
    assert_equal(build_index(file, 1000), whole)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("block_records", [1, 7, 1024])
def test_small_shards_are_indexed_together_as_alone(tmp_path: Path, seed: int, block_records: int):
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, rng.randrange(40), rng.randrange(200))) for _ in range(12)]
    payloads = [payloads_of(size)[rng.randrange(1 + size) :] for size in sizes]
    compress = [COMPRESS[rng.choice(("none", *COMPRESS))] for _ in sizes]
    contents = [of_shard(frames(each)) for of_shard, each in zip(compress, payloads, strict=True)]
    files = [make_shard(tmp_path / f"{number:02}", content) for number, content in enumerate(contents)]
    alone, read = [build_index(file, block_records) for file in files], []
    together = build_indexes(files, block_records, read.append)
    assert together is not None and read == list(itertools.accumulate(file.size_bytes for file in files))
    for one, other in zip(together, alone, strict=True):
        assert_equal(one, other)
    kept = decode_indexes(encode_indexes(together), files)
    for one, other in zip(kept, alone, strict=True):
        assert one.num_records == other.num_records and one.digest == other.digest
        assert [one.block(n) for n in range(len(one.counts))] == [other.block(n) for n in range(len(other.counts))]


@pytest.mark.parametrize("harm", ["length", "data", "cut", "more", "members", "large", "swapped"])
def test_shards_that_are_not_all_healthy_are_not_indexed_together(tmp_path: Path, harm: str):
    """Each is looked at alone then, and the indexes of all are the same as ever."""
    payloads = payloads_of(30)
    contents = [bytes(frames(payloads[start : start + 10])) for start in (0, 10, 20)]
    begin = starts_of(payloads[10:20])[4]
    if harm in ("length", "data"):
        at = begin + (0 if harm == "length" else 12)
        contents[1] = contents[1][:at] + bytes([contents[1][at] ^ 1]) + contents[1][at + 1 :]
    elif harm == "swapped":  # all frames are whole where the shards touch, but one lies in two of them
        contents[1:] = [contents[1][:begin], contents[1][begin:] + contents[2]]
        contents[1:] = [contents[1] + contents[2][:5], contents[2][5:]]
    elif harm == "large":  # it has another restart point
        contents[1] = gzip.compress(frames([bytes(100_000)] * 25))
    else:
        parts = map(gzip.compress, (contents[1][:begin], contents[1][begin:]))
        contents[1] = {"cut": contents[1][:-1], "more": contents[1] + b"x", "members": b"".join(parts)}[harm]
    files = [make_shard(tmp_path / str(number), content) for number, content in enumerate(contents)]
    assert build_indexes(files, 7) is None
    for one, other in zip(make_indexes(files, None, 7), [build_index(file, 7) for file in files], strict=True):
        assert_equal(one, other)


def test_a_small_shard_that_is_gone_or_has_changed_is_named_alone(tmp_path: Path):
    files = [make_shard(tmp_path / str(number), frames(payloads_of(5))) for number in range(4)]
    os.remove(files[1].uri)
    Path(files[2].uri).write_bytes(bytes(frames(payloads_of(6))))
    found = make_indexes(files, None, 7)
    assert [index.num_records for index in found] == [5, 0, 0, 5]
    assert "No such file" in str(found[1].error) and "changed while it was in use" in str(found[2].error)


@pytest.mark.parametrize("compression", list(COMPRESS))
@pytest.mark.parametrize("count", [0, 1, 100])
def test_encode_and_back(tmp_path: Path, compression: str, count: int):
    data = bytearray(frames(payloads_of(count)))
    if count > 1:
        data[starts_of(payloads_of(count))[50] + 14] ^= 1
    index = build_index(make_shard(tmp_path / "a", COMPRESS[compression](bytes(data))), 7)
    assert len(index.damages) == (count > 1)
    assert_equal(decode_indexes(encode_indexes([index]))[0], index)
    assert encode_indexes(decode_indexes(encode_indexes([index]))) == encode_indexes([index])


def test_damages_take_no_more_bytes_than_is_said(tmp_path: Path):
    large, texts = (1 << 62), ("", "a", "ü" * 300, "\udcff" * 80)
    damages = tuple(Damage(shard, large, large, text, text, large) for shard in texts for text in texts)
    index = build_index(make_shard(tmp_path / "a", frames(payloads_of(20))), 7)
    one = [replace(index, damages=(damage,)) for damage in damages]
    for each in (*one, replace(index, damages=damages)):
        taken = len(encode_indexes([each])) - len(encode_indexes([index]))
        assert taken <= each.damage_bytes <= taken + 30 * len(each.damages)


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
    read_into = ByteStream.read_into
    monkeypatch.setattr(ByteStream, "read_into", lambda stream, view: read_into(stream, view[:100_003]))
    assert digest_of(payloads) == digest, "however it is read"


def test_a_shard_of_damage_alone_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """16 bytes of the file are a damage, which takes 300 bytes of memory: 1 GiB of them took 20 GiB."""
    monkeypatch.setattr(index_module, "MOST_DAMAGES", 100)
    bad = framed(b"")[:-4] + b"ABCD"
    index = build_index(make_shard(tmp_path / "a", framed(b"x") + bad * 100), 1024)
    assert (index.num_records, len(index.damages)) == (1, 100)
    with pytest.raises(ShardReadError, match="b has more than 100 damages") as caught:
        build_index(make_shard(tmp_path / "b", framed(b"x") + bad * 101), 1024)
    assert caught.value.damage is not None and caught.value.damage.lost_bytes == -1
    with pytest.raises(ShardReadError, match="has more than 100 damages"):
        build_fixed_index(make_shard(tmp_path / "c.tar", tar_header("a.gz", 0) * 101 + bytes(1024)), RECORDS, 7)
