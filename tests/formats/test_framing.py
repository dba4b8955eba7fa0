"""Finding records and damage: every cut and every flipped bit of a small file, and hostile lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage
from loaderd.formats import framing
from loaderd.formats.shard_index import build_index
from loaderd.kernels.crc import framed
from loaderd.storage.files import list_shards
from tests.formats.shard_bytes import frames, payloads_of, reader, scanned, starts_of
from tests.helpers.record_bytes import header

PAYLOADS = [b"first record", b"", b"third" * 9, b"\x00" * 40, b"fifth"]
FRAMES = [framed(payload) for payload in PAYLOADS]
*STARTS, _ = starts_of(PAYLOADS)
FILE = b"".join(FRAMES)


@pytest.fixture
def small_buffers() -> Iterator[None]:
    """A window of 64 bytes and steps of 20, so that everything happens at an edge of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "_SCAN_BYTES", 64)
        patch.setattr(framing, "_SEEK_BYTES", 20)
        yield


# ------------------------------------------------------------------------------------------- healthy streams


@given(lengths=st.lists(st.integers(0, 200), max_size=30), most=st.integers(1, 300))
def test_records_around_the_edges_of_the_buffer(small_buffers: None, lengths: list[int], most: int):
    payloads = [bytes([number]) * length for number, length in enumerate(lengths)]
    assert scanned(frames(payloads), most) == (dict(enumerate(payloads)), [])


def test_records_larger_than_the_buffer():
    payloads = [bytes([number]) * size for number, size in enumerate((10, 3 << 20, 0, (1 << 20) - 16, 1 << 20, 5))]
    assert scanned(frames(payloads)) == (dict(enumerate(payloads)), [])
    assert scanned(frames(payloads), 300_001) == (dict(enumerate(payloads)), [])


def test_a_piece_says_where_it_is(small_buffers: None):
    payloads = payloads_of(40)
    starts = starts_of(payloads)
    number = 0
    for found in framing.scan("shard", reader(frames(payloads)), first_record=1000, first_offset=5000):
        assert isinstance(found, framing.RecordChunk)
        assert found.first_record == 1000 + number and found.offset == 5000 + starts[number]
        number += found.num_records
        assert found.stop_offset == 5000 + starts[number]
    assert number == 40


def test_a_damage_says_where_it_is(small_buffers: None):
    for where in (9, 14):  # in the length's CRC, in the data
        data = bytearray(FILE)
        data[STARTS[2] + where] ^= 1
        found = framing.scan("name", reader(bytes(data)), first_record=1000, first_offset=5000)
        (damage,) = [damage for damage in found if isinstance(damage, Damage)]
        assert (damage.shard, damage.record, damage.offset) == ("name", 1002, 5000 + STARTS[2])


# ---------------------------------------------------------------------------------------------------- damage


def test_every_truncation_names_the_record_that_is_cut():
    for stop in range(len(FILE)):
        records, damages = scanned(FILE[:stop])
        whole = sum(start + len(data) <= stop for start, data in zip(STARTS, FRAMES, strict=True))
        assert records == dict(enumerate(PAYLOADS[:whole]))
        left = stop - STARTS[whole]
        if left == 0:
            assert not damages
            continue
        (damage,) = damages
        assert (damage.record, damage.offset, damage.lost_bytes) == (whole, STARTS[whole], left)
        expected = f"a record of {len(FRAMES[whole])} bytes" if left >= 12 else "a header of 12 bytes"
        assert (damage.expected, damage.found) == (expected, f"{left} bytes")


@pytest.mark.parametrize("is_small", [False, True])
def test_every_flipped_bit_costs_its_record_and_no_other(is_small: bool, request: pytest.FixtureRequest):
    if is_small:
        request.getfixturevalue("small_buffers")
    for bit in range(8 * len(FILE)):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        hit = max(number for number, start in enumerate(STARTS) if start <= bit // 8)
        records, damages = scanned(bytes(data), 11 if is_small else 1 << 30)
        assert records == {number: p for number, p in enumerate(PAYLOADS) if number != hit}, bit
        (damage,) = damages
        assert (damage.shard, damage.record, damage.offset) == ("shard", hit, STARTS[hit])
        assert damage.lost_bytes == len(FRAMES[hit])


@given(count=st.integers(1, 40), hits=st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 255)), max_size=8))
def test_what_is_untouched_is_found(small_buffers: None, count: int, hits: list[tuple[int, int]]):
    payloads = payloads_of(count)
    starts = starts_of(payloads)
    data = bytearray(frames(payloads))
    for place, change in hits:
        data[place % len(data)] ^= change
    untouched = [
        p
        for p, (start, stop) in zip(payloads, itertools.pairwise(starts), strict=True)
        if data[start:stop] == framed(p)
    ]
    records, damages = scanned(bytes(data))
    assert list(records.values()) == untouched
    assert not records.keys() & {damage.record for damage in damages}
    assert len({damage.record for damage in damages}) == len(damages)
    lost = sum(damage.lost_bytes for damage in damages)
    assert lost + sum(len(payload) + 16 for payload in untouched) == len(data)


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 2**64 - 16, 2**64 - 40, 2**30 + 1, 2**32])
@pytest.mark.parametrize("with_crc", [True, False])
def test_hostile_lengths(length: int, with_crc: bool):
    head = bytearray(header(length))
    head[8] ^= not with_crc
    records, damages = scanned(FRAMES[0] + head + b"x" * 50 + FRAMES[2])
    assert records == {0: PAYLOADS[0], 2: PAYLOADS[2]}
    (damage,) = damages
    assert (damage.record, damage.offset) == (1, len(FRAMES[0])) and str(length) in damage.found


@pytest.mark.parametrize("can_jump", [True, False])
@pytest.mark.parametrize("behind", [FRAMES[0] + FRAMES[2], b""])
def test_a_whole_record_that_is_too_large_costs_no_other(small_buffers: None, behind: bytes, can_jump: bool):
    """A frame behind it, or the end of the stream, shows that it is whole."""
    data = FRAMES[0] + framed(b"\x01" * 500) + behind
    position = 0

    def read_into(view: memoryview) -> int:
        nonlocal position
        got = reader(data[position:])(view)
        position += got
        return got

    def jump_to(offset: int) -> bool:
        nonlocal position
        position = offset
        return True

    found = list(framing.scan("shard", read_into, most_bytes=60, jump_to=jump_to if can_jump else None))
    damages = [one for one in found if isinstance(one, Damage)]
    expected = "a record of at most 60 bytes in a compressed file of this size"
    assert damages == [Damage("shard", 1, len(FRAMES[0]), expected, "a whole one of 500 bytes", 516)]
    assert sum(one.num_records for one in found if isinstance(one, framing.RecordChunk)) == (3 if behind else 1)


@pytest.mark.parametrize("missing", [1, 4, 11, 12, 20, 26, 27])
def test_bytes_that_are_missing_in_the_data_cost_no_other_record(small_buffers: None, missing: int):
    """The length leads into the next record, or behind it, or behind the end of the file."""
    for behind in ([], FRAMES[3:4], [framed(b""), *FRAMES[3:]]):
        data = FRAMES[0] + FRAMES[2][:12] + FRAMES[2][12 + missing :] + b"".join(behind)
        records, damages = scanned(data, 50)
        assert list(records.values()) == [PAYLOADS[0], *[part[12:-4] for part in behind]]
        (damage,) = damages
        assert (damage.record, damage.offset) == (1, len(FRAMES[0]))
        assert damage.lost_bytes == len(FRAMES[2]) - missing


@pytest.mark.parametrize("length", [5, 61, 77, 90, 1000, framing.MAX_RECORD_BYTES])
def test_a_length_that_is_forged_swallows_no_other_record(small_buffers: None, length: int):
    data = FRAMES[0] + header(length) + FRAMES[2][12:] + FRAMES[3] + FRAMES[4]
    records, damages = scanned(data)
    assert [payload for payload in records.values() if payload in PAYLOADS] == [PAYLOADS[n] for n in (0, 3, 4)]
    assert damages[0].record == 1 and damages[0].offset == len(FRAMES[0])


def test_a_lost_frame_is_found_again_at_any_distance(small_buffers: None):
    for garbage in range(1, 200):
        records, damages = scanned(FRAMES[0] + b"\xff" * garbage + FRAMES[2] + FRAMES[3])
        assert records == {0: PAYLOADS[0], 2: PAYLOADS[2], 3: PAYLOADS[3]}
        assert [(d.record, d.lost_bytes) for d in damages] == [(1, garbage)]


# ----------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("length", [1 << 29, 1 << 20, 201], ids=["beyond the end", "of a MiB", "small"])
def test_a_file_of_wrong_lengths_is_given_up(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each of them is right, and what it says is behind it holds the next. To read all of it for each takes hours."""
    monkeypatch.setattr(framing, "_ANY_AGAIN_BYTES", 1 << 24)
    frame = framed(b"healthy")
    (tmp_path / "a").write_bytes(frame * 3 + header(length) * 150_000)
    (file,) = list_shards(str(tmp_path / "a"))
    index = build_index(file, 1024)
    assert index.num_records == 3 and 10 < len(index.damages) < 2000
    last = index.damages[-1]
    assert (last.expected, last.lost_bytes) == ("records, each behind the one before", -1)
    assert last.found == f"{len(index.damages) - 1} wrong lengths with right CRCs"


def test_shards_that_were_cut_and_joined_are_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(framing, "_ANY_AGAIN_BYTES", 1 << 16)
    frame = framed(bytes(range(256)) * 40)
    (tmp_path / "a").write_bytes((frame * 3 + frame[:-5000]) * 300)
    (file,) = list_shards(str(tmp_path / "a"))
    index = build_index(file, 1024)
    assert (index.num_records, len(index.damages)) == (900, 300)
