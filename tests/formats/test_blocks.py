"""Reading blocks: together or with care, the same records; and damage that comes later costs what it hit."""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage, ShardReadError
from loaderd.formats import framing
from loaderd.formats.blocks import Block, BlockReader
from loaderd.formats.shard_index import ANCHOR_RECORDS, build_index
from loaderd.kernels.crc import framed
from loaderd.storage.shard_file import Compression, ShardFile
from tests.formats.shard_bytes import (
    COMPRESS,
    Records,
    blocks_of,
    frames,
    make_shard,
    overwrite,
    payloads_of,
    random_payloads,
    read_blocks,
    starts_of,
)

MakeReader = Callable[..., BlockReader]


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    readers: list[BlockReader] = []

    def make(*files: ShardFile, compression: Compression = "none") -> BlockReader:
        readers.append(BlockReader(list(files), [compression] * len(files)))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def together(reader: BlockReader, blocks: list[Block]) -> list[bytes] | None:
    run = reader.read_together(blocks)
    if run is None:
        return None
    buffer, ends = run
    return [buffer[start + 12 : stop - 4].tobytes() for start, stop in itertools.pairwise(ends.tolist())]


# ------------------------------------------------------------------------------------------------------- healthy


@given(
    counts=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    block_records=st.sampled_from([1, 5, 31, 32, 33, 64, 100, 500]),
    picks=st.lists(st.integers(0, 2**31), min_size=1, max_size=6),
)
def test_any_blocks_read_together_are_what_each_is_alone(
    tmp_path: Path, make_reader: MakeReader, counts: list[int], block_records: int, picks: list[int]
):
    payloads = [[bytes([shard]) * 3 + payload for payload in payloads_of(n)] for shard, n in enumerate(counts)]
    files = [make_shard(tmp_path / f"{shard}", frames(part)) for shard, part in enumerate(payloads)]
    blocks = [
        block for shard, file in enumerate(files) for block in blocks_of(build_index(file, block_records), shard)
    ]
    chosen = [blocks[pick % len(blocks)] for pick in picks]
    reader = make_reader(*files)
    assert all(reader.can_read_together(block) for block in blocks)
    found = together(reader, chosen)
    assert found == [
        payload for b in chosen for payload in payloads[b.shard][b.first_record : b.first_record + b.num_records]
    ]
    alone = []
    for block in chosen:
        records, damages = read_blocks(reader, [block])
        assert not damages
        alone += list(records.values())
    assert found == alone
    reader.close()


@pytest.mark.parametrize("compression", list(COMPRESS))
def test_a_part_of_a_block(tmp_path: Path, make_reader: MakeReader, compression: Compression):
    payloads = payloads_of(200)
    file = make_shard(tmp_path / "a", COMPRESS[compression](frames(payloads)))
    (block,) = blocks_of(build_index(file, 200))
    reader = make_reader(file, compression=compression)
    assert reader.can_read_together(block)
    for first, stop in ((0, 1), (0, 200), (31, 33), (64, 96), (199, 200), (100, 150)):
        covered: set[int] = set()
        for found in reader.read(block, first, stop):
            assert not isinstance(found, Damage)
            covered |= set(range(found.first_record, found.first_record + found.num_records))
        assert covered >= set(range(first, stop))


# ------------------------------------------------------------------------------------------- damage that comes later


class Shard:
    """A plain shard of 100 records in blocks of 40, indexed while it was healthy."""

    def __init__(self, path: Path, block_records: int = 40) -> None:
        self.payloads = payloads_of(100)
        self.starts = starts_of(self.payloads)
        self.data = frames(self.payloads)
        self.file = make_shard(path, self.data)
        self.blocks = blocks_of(build_index(self.file, block_records))

    def without(self, lost: set[int]) -> Records:
        return {number: payload for number, payload in enumerate(self.payloads) if number not in lost}


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path / "a")


def test_every_changed_byte_costs_its_record(shard: Shard, make_reader: MakeReader):
    reader = make_reader(shard.file)
    # The end of a block, with an anchor 8 records in front of it.
    for place in range(shard.starts[68], shard.starts[81]):
        changed = bytearray(shard.data)
        changed[place] ^= 1 << place % 8
        overwrite(shard.file, bytes(changed))
        hit = max(number for number, start in enumerate(shard.starts) if start <= place)
        assert together(reader, shard.blocks) is None
        # Only the block that is hit: the others are as they were.
        (block,) = [b for b in shard.blocks if b.first_record <= hit < b.first_record + b.num_records]
        records, (damage,) = read_blocks(reader, [block])
        in_block = range(block.first_record, block.first_record + block.num_records)
        assert records == {number: shard.payloads[number] for number in in_block if number != hit}
        assert (damage.shard, damage.record, damage.offset) == (shard.file.uri, hit, shard.starts[hit])
        assert damage.lost_bytes == len(shard.payloads[hit]) + 16
        assert damage.expected and damage.found


@given(
    block_records=st.sampled_from([7, 40, 100]),
    scan_bytes=st.sampled_from([64, 500, 1 << 20]),
    hits=st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 255)), min_size=1, max_size=5),
)
def test_any_damage_costs_no_more_than_lies_between_two_anchors(
    tmp_path: Path, make_reader: MakeReader, block_records: int, scan_bytes: int, hits: list[tuple[int, int, int]]
):
    shard = Shard(tmp_path / "a", block_records)
    changed = bytearray(shard.data)
    for place, size, value in hits:
        for offset in range(place % len(changed), min(place % len(changed) + size, len(changed))):
            changed[offset] ^= value
    overwrite(shard.file, bytes(changed))
    reader = make_reader(shard.file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "_SCAN_BYTES", scan_bytes)
        records, damages = read_blocks(reader, shard.blocks)
    reader.close()
    hit, broken = set(), set()
    for number, (start, stop) in enumerate(itertools.pairwise(shard.starts)):
        if changed[start:stop] != shard.data[start:stop]:
            hit.add(number)
        if changed[start : start + 12] != shard.data[start : start + 12]:
            broken.add(number)
    # Where records next to each other are hit, nobody knows how many a lost stretch held: then what lies between the
    # first and the last broken frame of the part is lost.
    lost = set(hit)
    for block in shard.blocks:
        for first in range(block.first_record, block.first_record + block.num_records, ANCHOR_RECORDS):
            part = range(first, min(first + ANCHOR_RECORDS, block.first_record + block.num_records))
            inside = broken & set(part)
            if not any({number, number + 1} <= hit & set(part) for number in inside | {n - 1 for n in inside}):
                continue
            lost |= set(range(min(inside), max(inside) + 1)) if inside else set()
    assert records.items() >= shard.without(lost).items() and records.items() <= shard.without(hit).items()
    named = [damage.record for damage in damages]
    assert sorted(named) == sorted(set(shard.without(set())) - set(records)), "each is named once"


def test_records_that_were_put_in_the_place_of_others_shift_none_behind_the_next_anchor(
    shard: Shard, make_reader: MakeReader
):
    """Two whole records of the same size where three were: whoever counted frames would be one off."""
    room = shard.starts[53] - shard.starts[50]
    other = framed(b"x" * 5) + framed(b"y" * (room - 37))
    overwrite(shard.file, shard.data[: shard.starts[50]] + other + shard.data[shard.starts[53] :])
    records, _ = read_blocks(make_reader(shard.file), shard.blocks)
    kept = shard.without(set(range(50, 80)))
    assert {number: records[number] for number in kept} == kept


def test_a_frame_more_than_there_were_is_not_counted_from_the_end(shard: Shard, make_reader: MakeReader):
    """Behind the damage are as many frames as the index has records there: which of them is which?"""
    start, stop = shard.starts[48], shard.starts[49]
    other = b"\xff" * (stop - start - 18) + framed(b"zz")
    overwrite(shard.file, shard.data[:start] + other + shard.data[stop:])
    records, damages = read_blocks(make_reader(shard.file), shard.blocks)
    lost = set(range(48, 72))
    assert records == shard.without(lost)
    assert {damage.record for damage in damages} == lost


def test_a_file_that_is_cut_while_it_is_open(shard: Shard, make_reader: MakeReader):
    reader = make_reader(shard.file)
    assert together(reader, shard.blocks) == shard.payloads
    os.truncate(shard.file.uri, shard.starts[60])
    assert together(reader, shard.blocks[-1:]) is None
    with pytest.raises(ShardReadError, match="changed while it was in use"):
        read_blocks(reader, shard.blocks)


def test_a_file_that_is_appended_to_or_written_anew_while_it_is_open(shard: Shard, make_reader: MakeReader):
    """Others of the same sizes have right CRCs at the old places."""
    for mode, data in (("ab", framed(b"one more")), ("wb", frames([payload[::-1] for payload in shard.payloads]))):
        shard = Shard(Path(shard.file.uri))
        reader = make_reader(shard.file)
        assert together(reader, shard.blocks) == shard.payloads
        with open(shard.file.uri, mode) as file:
            file.write(data)
        os.utime(shard.file.uri, ns=(0, shard.file.mtime_ns + 1))
        for read in (together, read_blocks):
            with pytest.raises(ShardReadError, match="changed while it was in use") as caught:
                read(reader, shard.blocks)
            assert caught.value.damage is not None and caught.value.damage.shard == shard.file.uri


def test_a_file_that_is_replaced(shard: Shard, make_reader: MakeReader, tmp_path: Path):
    reader = make_reader(shard.file)
    assert together(reader, shard.blocks) == shard.payloads
    (tmp_path / "new").write_bytes(frames(payloads_of(90)))
    os.replace(tmp_path / "new", shard.file.uri)
    # Who has the old file open goes on reading it.
    assert together(reader, shard.blocks) == shard.payloads
    assert read_blocks(reader, shard.blocks) == (shard.without(set()), [])
    late = make_reader(shard.file)
    for read in (together, read_blocks):
        with pytest.raises(ShardReadError, match="changed while it was in use"):
            read(late, shard.blocks)


# --------------------------------------------------------------------------------- damage to compressed shards


def stored(data: bytes) -> bytes:
    """GZIP without compression: a changed byte of it is a changed byte of the data."""
    return gzip.compress(data, 0)


@pytest.mark.parametrize("where", [1, 9, 13])
@pytest.mark.parametrize("hit", [0, 50, 99])
def test_a_changed_byte_of_a_compressed_shard(tmp_path: Path, make_reader: MakeReader, where: int, hit: int):
    payloads = payloads_of(100)
    starts = starts_of(payloads)
    whole = stored(frames(payloads))
    file = make_shard(tmp_path / "a", whole)
    blocks = blocks_of(build_index(file, 40))
    changed = bytearray(whole)
    changed[whole.index(framed(payloads[hit])) + where] ^= 1
    overwrite(file, bytes(changed))
    records, (damage,) = read_blocks(make_reader(file, compression="gzip"), blocks)
    assert records == {number: payload for number, payload in enumerate(payloads) if number != hit}
    assert (damage.record, damage.offset) == (hit, starts[hit])


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_compressed_shard_that_becomes_corrupt(tmp_path: Path, make_reader: MakeReader, compression: Compression):
    payloads = random_payloads(3000)
    starts = starts_of(payloads)
    data = bytearray(frames(payloads))
    for number in (1000, 2000):  # three blocks
        data[starts[number] + 13] ^= 1
    whole = COMPRESS[compression](bytes(data))
    file = make_shard(tmp_path / "a", whole)
    index = build_index(file, 40)
    blocks = blocks_of(index)
    assert [(block.first_record, block.num_records) for block in blocks] == [(0, 1000), (1001, 999), (2001, 999)]
    healthy = {number: payload for number, payload in enumerate(payloads) if number not in (1000, 2000)}
    reader = make_reader(file, compression=compression)
    assert read_blocks(reader, blocks) == (healthy, [])
    for hit in range(100, len(whole), 9001):
        overwrite(file, whole[:hit] + b"\x55" * 50 + whole[hit + 50 :])
        records, damages = read_blocks(reader, blocks)
        assert records.items() <= healthy.items(), "what is delivered is what was there, at its old number"
        named = [damage.record for damage in damages]
        assert sorted([*records, *named]) == sorted(healthy), "every other one is named, once"
        # Nothing that is in front of the damage depends on it.
        sure = len(zlib.decompressobj(31 if compression == "gzip" else 15).decompress(whole[:hit]))
        assert all(number in records for number in healthy if starts[number + 1] <= sure)


def test_what_broke_a_compressed_shard_is_said(tmp_path: Path, make_reader: MakeReader):
    payloads = payloads_of(400)
    front, behind = gzip.compress(frames(payloads[:250])), gzip.compress(frames(payloads[250:]))
    file = make_shard(tmp_path / "a", front + behind)
    blocks = blocks_of(build_index(file, 40))
    overwrite(file, front + b"U" * 10 + behind[10:])
    records, damages = read_blocks(make_reader(file, compression="gzip"), blocks)
    assert records == dict(enumerate(payloads[:250]))
    assert [damage.record for damage in damages] == list(range(250, 400))
    assert {damage.expected for damage in damages} == {
        f"valid compressed data behind compressed byte {len(front) + 1}"
    }
    assert damages[0].found.endswith("incorrect header check")
