"""Restart points: what is read from one is what the whole stream holds there, or is named as damage."""

from __future__ import annotations

import gzip
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaderd.errors import Damage, ShardFormatError, ShardReadError
from loaderd.formats import inflate, point_finder
from loaderd.formats.blocks import BlockReader
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.framing import RecordChunk
from loaderd.formats.inflate import inflate_into, read_at_of
from loaderd.formats.point_finder import open_finder
from loaderd.formats.reader import Reader, Reading
from loaderd.formats.restart_points import RestartPoints
from loaderd.formats.shard_index import ShardIndex, build_index, decode_indexes, encode_indexes
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import Block, ShardFile
from tests.formats.shard_bytes import COMPRESS, frames, make_shard, random_payloads

RECORDS = FixedRecords(np.dtype([("number", "<i4"), ("rest", "u1", (96,))]))
SIZE = RECORDS.record_bytes


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_finder, "SPAN_BYTES", 40_000)


@pytest.fixture(params=["isal", "zlib"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    inflate.fast_library.cache_clear()
    yield request.param
    inflate.fast_library.cache_clear()


def some_bytes(rng: random.Random, num_bytes: int) -> bytes:
    """Of several kinds: noise, text that repeats near and far, zeros."""
    words = [rng.randbytes(rng.randint(1, 300)) for _ in range(rng.choice([1, 5, 400]))]
    made = bytearray()
    while len(made) < num_bytes:
        kind = rng.random()
        if kind < 0.2:
            made += rng.randbytes(rng.randint(1, 5000))
        elif kind < 0.25:
            made += bytes(rng.randint(1, 100_000))
        elif kind < 0.4 and made:
            far = rng.randint(1, min(len(made), 32_768))
            made += made[-far:][: rng.randint(1, 3000)]
        else:
            made += b"".join(rng.choices(words, k=rng.randint(1, 50)))
    return bytes(made[:num_bytes])


def some_stream(rng: random.Random, plain: bytes, window_bits: int) -> bytes:
    """``plain`` in members of any number, level, strategy and memory, with any flushes within."""
    stored, at = bytearray(), 0
    while at < len(plain) or not stored:
        stop = len(plain) if rng.random() < 0.4 else at + rng.choice([1, 100, 30_000, 100_000])
        level, strategy = rng.choice([0, 1, 6, 9]), rng.choice([0, 0, 1, 2, 3, 4])
        made = zlib.compressobj(level, wbits=window_bits, memLevel=rng.choice([1, 4, 8, 9]), strategy=strategy)
        while at < min(stop, len(plain)):
            part = plain[at : min(stop, at + rng.choice([10, 5000, 80_000, 1 << 20]))]
            stored += made.compress(part)
            at += len(part)
            if rng.random() < 0.5:
                stored += made.flush(rng.choice([zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH, zlib.Z_BLOCK]))
        stored += made.flush()
        if window_bits == 31 and rng.random() < 0.1:
            stored += bytes(rng.randint(1, 20))
    return bytes(stored)


def found_points(stored: bytes, compression: str, rng: random.Random) -> tuple[bytes, RestartPoints]:
    finder = open_finder("a", read_at_of(memoryview(stored)), compression)
    plain = bytearray()
    while part := finder.read(rng.choice([1, 777, 1 << 16, 1 << 20])):
        plain += part
    points = finder.points()
    return bytes(plain), RestartPoints.from_wire(points.to_wire(), len(stored))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 1 << 32), compression=st.sampled_from(["gzip", "zlib"]))
def test_what_is_inflated_from_any_point_is_what_the_stream_holds(seed: int, compression: str):
    rng = random.Random(seed)
    plain = some_bytes(rng, rng.choice([0, 1, 70_000, 300_000]))
    stored = some_stream(rng, plain, 31 if compression == "gzip" else 15)
    whole, points = found_points(stored, compression, rng)
    assert whole == plain
    offsets = points.offsets.tolist()
    assert all(stop - start >= 40_000 for start, stop in pairwise(offsets))
    for number, start in enumerate(offsets):
        point = points.at(start + rng.choice([0, 1]))
        assert point.offset == start
        stop = min(offsets[number + 1] + 32_768, len(plain)) if number + 1 < len(offsets) else len(plain)
        skipped = rng.randint(0, stop - start)
        view = memoryview(bytearray(stop - start - skipped))
        part = memoryview(stored)[point.bit >> 3 : point.stop]
        assert inflate_into(view, part, compression, point, skipped)
        assert view == plain[start + skipped : stop]
        assert len(view) < 2 or not inflate_into(view, part[:1], compression, point, skipped), "it is cut"


def test_only_what_is_referred_to_is_kept_of_a_window():
    rng = random.Random(0)
    plain = rng.randbytes(1 << 20)
    points = found_points(gzip.compress(plain), "gzip", rng)[1]
    assert len(points.windows) > 10 and max(map(len, points.windows)) < 100, "noise refers to nothing"
    made = zlib.compressobj(wbits=31)
    stored = b"".join(made.compress(plain[:20_000] * 5) + made.flush(zlib.Z_SYNC_FLUSH) for _ in range(5))
    points = found_points(stored + made.flush(), "gzip", rng)[1]
    assert 15_000 < max(map(len, points.windows)) < 33_000, "here all of the last 20,000 bytes are referred to"


# ------------------------------------------------------------------------------------------- shards and blocks


def blocks_of(index: ShardIndex) -> list[Block]:
    (kept,) = decode_indexes(encode_indexes([index]), [index.file])
    return [Block(0, *kept.block(number)) for number in range(len(kept.counts))]


def numbers_in(reader: Reader, blocks: list[Block]) -> list[bytes]:
    run = reader.read_together(blocks)
    assert run is not None
    starts, lengths = reader.payloads(run[1])
    return [run[0][start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]


def read_with_care(reader: Reader, block: Block) -> tuple[dict[int, bytes], set[int]]:
    """By number, the records of a block that are found, and the numbers of those that are damaged."""
    found: dict[int, bytes] = {}
    damaged = set()
    for piece in reader.read(block, 0, block.num_records):
        if isinstance(piece, Damage):
            damaged.add(piece.record)
            continue
        for number, (start, length) in enumerate(zip(piece.payload_starts, piece.payload_lengths, strict=True)):
            if number not in piece.bad:
                found[piece.first_record + number] = piece.buffer[start : start + length].tobytes()
    return found, damaged


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_blocks_of_tfrecord_in_any_order(tmp_path: Path, library: str, compression: str):
    payloads = [*random_payloads(3000, 100), bytes(200_000), *random_payloads(2000, 30)]
    file = make_shard(tmp_path / "a", COMPRESS[compression](frames(payloads)))
    blocks = blocks_of(build_index(file, 64))
    assert len(blocks) > 6 and sum(block.num_records for block in blocks) == len(payloads)
    random.Random(0).shuffle(blocks)
    reader = BlockReader([file], [compression])  # type: ignore[list-item]
    with closing(reader):
        numbers = [block.first_record + number for block in blocks for number in range(block.num_records)]
        assert numbers_in(reader, blocks) == [payloads[number] for number in numbers]
        narrowed = reader.narrowed(blocks[0], 40, 70)
        assert narrowed.num_records < blocks[0].num_records
        first = narrowed.first_record
        assert numbers_in(reader, [narrowed]) == payloads[first : first + narrowed.num_records]
        for block in blocks[:3]:
            found, damaged = read_with_care(reader, block)
            assert not damaged and {found[number] == payloads[number] for number in found} == {True}


def test_damage_that_comes_later_costs_only_the_blocks_it_is_in(tmp_path: Path):
    payloads = random_payloads(4000, 100)
    file = make_shard(tmp_path / "a", gzip.compress(frames(payloads)))
    blocks = blocks_of(build_index(file, 64))
    whole = Path(file.uri).read_bytes()
    middle = blocks[len(blocks) // 2]
    assert middle.point is not None
    hit = (middle.point.bit >> 3) + 500
    Path(file.uri).write_bytes(whole[:hit] + b"\xff" * 40 + whole[hit + 40 :])
    changed = make_shard(tmp_path / "a", Path(file.uri).read_bytes())
    with closing(BlockReader([changed], ["gzip"])) as reader:
        lost = set()
        for block in blocks:
            found, damaged = read_with_care(reader, block)
            assert all(found[number] == payloads[number] for number in found)
            assert len(found) + len(damaged) == block.num_records
            lost |= damaged
            if block.first_record < middle.first_record - 500 or block.first_record > middle.first_record:
                assert reader.read_together([block]) is not None
    assert lost and lost <= set(range(middle.first_record - 2, middle.first_record + middle.num_records))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_points_that_lie_give_right_records_or_damage(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    payloads = random_payloads(1500, 60)
    file = make_shard(tmp_path / "a", gzip.compress(frames(payloads), rng.choice([1, 6])))
    index = build_index(file, 64)
    assert index.points is not None
    wire = index.points.to_wire()
    column = rng.randrange(4)
    if column == 3:
        number = rng.randrange(len(wire[3]))
        wire[3][number] = rng.choice([b"", b"x", zlib.compress(rng.randbytes(32_768)), zlib.compress(bytes(1 << 20))])
    else:
        values = np.frombuffer(wire[column], "<i8").copy()
        values[rng.randrange(len(values))] += rng.choice([-1, 1, 7, -900, 900, 1 << 40, -(1 << 40)])
        wire[column] = values.tobytes()
    index.points = RestartPoints(*(np.cumsum(np.frombuffer(part, "<i8")) for part in wire[:3]), wire[3])
    try:
        blocks = blocks_of(index)
    except ValueError:
        return
    with closing(BlockReader([file], ["gzip"])) as reader:
        for block in blocks:
            if reader.can_read_together(block) and reader.read_together([block]) is not None:
                assert numbers_in(reader, [block]) == payloads[block.first_record :][: block.num_records]
            found, damaged = read_with_care(reader, block)
            assert all(found[number] == payloads[number] for number in found)
            assert len(found.keys() | damaged) == block.num_records


def test_windows_and_points_of_a_forged_index_are_bounded(tmp_path: Path):
    file = make_shard(tmp_path / "a", gzip.compress(frames(random_payloads(1500, 60))))
    index = build_index(file, 64)
    assert index.points is not None
    good = index.points.to_wire()
    for bad in (
        [*good[:3], [*good[3][:-1], bytes(40_000)]],
        [*good[:3], good[3][:-1]],
        [good[0], good[1], np.diff([1 << 40] * len(good[3]), prepend=0).astype("<i8").tobytes(), good[3]],
        [b"", b"", b"", []],
        -1,
        file.size_bytes + 1,
        "7",
    ):
        with pytest.raises((ValueError, TypeError)):
            RestartPoints.from_wire(bad, file.size_bytes)


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_without_a_libz_a_shard_that_may_have_points_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
):
    small, large = (
        make_shard(tmp_path / name, COMPRESS[compression](frames(random_payloads(count, 100))))
        for name, count in (("small", 300), ("large", 3000))
    )
    with_libz = encode_indexes([build_index(small, 64)])
    monkeypatch.setattr(point_finder, "_libz", lambda: None)
    assert encode_indexes([build_index(small, 64)]) == with_libz
    with pytest.raises(ShardFormatError, match=r"large is compressed.*\n?.*libz\.so\.1"):
        build_index(large, 64)


def test_points_do_not_depend_on_what_compresses_their_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(point_finder, "_DOUBLED_AFTER", 4)
    plain = random.Random(0).randbytes(30_000) * 40
    found = []
    for trimmed in (lambda *_: b"", lambda window, *_: window * 1000):
        monkeypatch.setattr(point_finder, "trimmed", trimmed)
        finder = open_finder("a", read_at_of(memoryview(gzip.compress(plain, 1))), "gzip")
        while finder.read(1 << 20):
            pass
        found.append(finder.offsets)
    assert found[0] == found[1]
    assert np.diff(found[0]).min() >= 40_000 and np.diff(found[0])[-1] >= 80_000, "the span doubles"


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_large_stretch_without_points_is_inflated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
):
    monkeypatch.setattr("loaderd.formats.shard_index.is_remote", lambda _: is_remote)  # then it has CRCs
    monkeypatch.setattr(point_finder, "SPAN_BYTES", 1 << 20)
    for module in ("shard_index", "blocks"):
        monkeypatch.setattr(f"loaderd.formats.{module}.MAX_WHOLE_BYTES", 100_000)
    monkeypatch.setattr("loaderd.formats.shard_index.MAX_BLOCK_BYTES", 100_000)
    payloads = random_payloads(5000, 100)
    stored = frames(payloads)
    hit = stored.index(payloads[3000])
    if not is_remote:
        payloads[3000] = b""
        stored = stored[:hit] + bytes([stored[hit] ^ 1]) + stored[hit + 1 :]
    file = make_shard(tmp_path / "a", gzip.compress(stored))
    index = build_index(file, 64)
    blocks = blocks_of(index)
    assert [block.num_records for block in blocks] == ([5000] if is_remote else [3000, 1999])
    reached: list[int] = []
    with closing(BlockReader([file], ["gzip"], Reading(reached.append))) as reader:
        for block in blocks:
            reached.clear()
            for first in range(0, block.num_records, 700):
                stop = min(first + 700, block.num_records)
                assert reader.narrowed(block, first, stop) == block
                found: dict[int, bytes] = {}
                for piece in reader.read(block, first, stop):
                    assert isinstance(piece, RecordChunk)
                    rows = zip(piece.payload_starts, piece.payload_lengths, strict=True)
                    for number, (start, length) in enumerate(rows, piece.first_record):
                        found[number] = piece.buffer[start : start + length].tobytes()
                wanted = range(block.first_record + first, block.first_record + stop)
                assert all(found[number] == payloads[number] for number in wanted)
            assert reached == sorted(reached), "never again from the start"


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_reading_on_gives_what_reading_from_the_start_gives(tmp_path: Path, seed: int):
    """Pieces with bad records, and stretches that are lost, in any ranges of rising or falling records."""
    rng = random.Random(seed)
    pieces: list[RecordChunk | Damage] = []
    number = 0
    while number < 60:
        if rng.random() < 0.3:
            pieces.append(Damage("a", number, 0, "", ""))
            number += 1
            continue
        count = rng.randint(1, 20)
        bad = tuple(sorted(rng.sample(range(count), rng.randint(0, min(2, count)))))
        pieces += [Damage("a", number + one, 0, "", "") for one in bad]
        pieces.append(RecordChunk(np.zeros(0, np.uint8), np.arange(count + 1), 0, number, bad))
        number += count
    file = make_shard(tmp_path / "a", b"")
    block = Block(0, 0, 0, number, 0, b"")
    with closing(Reader([file], ["gzip"])) as reader:
        for _ in range(8):
            first = rng.randrange(number)
            stop = rng.randint(first + 1, number)
            healthy, damaged = set[int](), set[int]()
            for piece in reader._read_on(block, first, stop, lambda: iter(pieces)):
                if isinstance(piece, Damage):
                    damaged.add(piece.record)
                else:
                    healthy |= {piece.first_record + n for n in range(piece.num_records) if n not in piece.bad}
            lost = {piece.record for piece in pieces if isinstance(piece, Damage)}
            wanted = set(range(first, stop))
            assert healthy & wanted == wanted - lost and damaged & wanted == wanted & lost


# ----------------------------------------------------------------------------------------- records of a fixed size


def fixed_bytes(count: int) -> bytes:
    rows = np.zeros(count, RECORDS.dtype)
    rows["number"] = np.arange(count)
    rows["rest"] = np.random.default_rng(0).integers(0, 30, (count, 96))
    return rows.tobytes()


def zstd_of(*parts: bytes) -> bytes:
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in parts)


def in_parts(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[at : at + num_bytes] for at in range(0, len(data), num_bytes)]


SKIPPED = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"seek "
FIXED = {
    "gzip": gzip.compress,
    "zstd": lambda data: SKIPPED.join(zstd_of(part) for part in in_parts(data, 50_001)) + SKIPPED,
}


def fixed_index(path: Path, data: bytes) -> tuple[ShardFile, ShardIndex]:
    file = make_shard(path, data)
    return file, build_fixed_index(file, RECORDS, 64)


@pytest.fixture(autouse=True)
def _no_whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.formats.fixed_index._MAX_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr(point_finder, "_FRAMES_BYTES", 1000)


@pytest.mark.parametrize("compression", list(FIXED))
def test_blocks_of_fixed_records(tmp_path: Path, library: str, compression: str):
    data = fixed_bytes(5000)
    file, index = fixed_index(tmp_path / "a", FIXED[compression](data))
    blocks = blocks_of(index)
    assert not index.damages and len(blocks) > 5 and all(block.crc is not None for block in blocks)
    random.Random(1).shuffle(blocks)
    with closing(FixedBlockReader(RECORDS, [file], [index.compression])) as reader:
        found = b"".join(numbers_in(reader, blocks))
        assert found == b"".join(data[block.offset : block.offset + block.num_bytes] for block in blocks)
        for block in blocks:
            assert len(read_with_care(reader, block)[0]) == block.num_records
        wrong = blocks[0]._replace(crc=(blocks[0].crc or 0) ^ 1)  # no check at the end of the stream would say so
        with pytest.raises(ShardReadError, match="CRC32C"):
            reader.read_together([wrong])
        with pytest.raises(ShardReadError, match="CRC32C"):
            list(reader.read(wrong, 0, wrong.num_records))


@pytest.mark.parametrize("compression", list(FIXED))
def test_a_garbled_file_of_fixed_records_has_none(tmp_path: Path, compression: str):
    stored = bytearray(FIXED[compression](fixed_bytes(5000)))
    stored[len(stored) // 2 : len(stored) // 2 + 30] = b"\xff" * 30
    _, index = fixed_index(tmp_path / "a", bytes(stored))
    assert not len(index.counts) and len(index.damages) == 1


@pytest.mark.parametrize("frames", [1, 2])
def test_a_frame_of_zstd_is_read_on_where_the_reading_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: int
):
    monkeypatch.setattr("loaderd.formats.shard_index.MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr("loaderd.formats.fixed_blocks.MAX_WHOLE_BYTES", 1000)
    data = fixed_bytes(20_000)
    file, index = fixed_index(tmp_path / "a", zstd_of(*[data] * frames))
    *_, block = blocks_of(index)
    assert (index.points is not None) == (frames == 2) and block.num_records == 20_000
    reached: list[int] = []
    with closing(FixedBlockReader(RECORDS, [file], ["zstd"], Reading(reached.append))) as reader:
        begin = block.first_record
        for first in range(begin, begin + 20_000, 1000):
            found = b""
            for piece in reader.read(block, first - begin, first - begin + 1000):
                assert isinstance(piece, RecordChunk)
                found += piece.buffer[max(0, first - piece.first_record) * SIZE : piece.num_records * SIZE].tobytes()
            assert found[: 1000 * SIZE] == data[(first - begin) * SIZE :][: 1000 * SIZE]
        assert reached == sorted(reached), "never again from the start"
        (again,) = reader.read(block, 7, 8)
        assert isinstance(again, RecordChunk) and again.first_record == begin
