"""Finding records and damage: every cut and every flipped bit of a small file, and hostile lengths."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage
from loaderd.shards import crc, framing

PAYLOADS = [b"first record", b"", b"third" * 9, b"\x00" * 40, b"fifth"]


def frame(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", crc.masked_crc(length)) + payload + struct.pack("<I", crc.masked_crc(payload))


FRAMES = [frame(payload) for payload in PAYLOADS]
STARTS = [sum(map(len, FRAMES[:number])) for number in range(len(FRAMES))]
FILE = b"".join(FRAMES)


def reader(data: bytes, most: int = 1 << 30) -> Callable[[memoryview], int]:
    position = 0

    def read_into(view: memoryview) -> int:
        nonlocal position
        part = data[position : position + min(most, len(view))]
        view[: len(part)] = part
        position += len(part)
        return len(part)

    return read_into


def read(data: bytes, most: int = 1 << 30) -> tuple[dict[int, bytes], list[Damage]]:
    """The healthy payloads by record number, and the damage."""
    records: dict[int, bytes] = {}
    damages = []
    for found in framing.scan("shard", reader(data, most)):
        if isinstance(found, Damage):
            damages.append(found)
            continue
        for index, (start, length) in enumerate(zip(found.payload_starts, found.payload_lengths, strict=True)):
            assert found.buffer[found.ends[index] : found.ends[index] + 1].size
            if index not in found.bad:
                assert found.first_record + index not in records
                records[found.first_record + index] = found.buffer[start : start + length].tobytes()
    return records, damages


@pytest.mark.parametrize("most", [1, 7, 13, 1 << 30])
def test_any_way_of_reading_finds_the_same(most: int):
    assert read(FILE, most) == (dict(enumerate(PAYLOADS)), [])
    assert read(b"", most) == ({}, [])


def test_every_truncation_names_the_record_that_is_cut():
    for stop in range(len(FILE)):
        records, damages = read(FILE[:stop])
        whole = sum(start + len(data) <= stop for start, data in zip(STARTS, FRAMES, strict=True))
        assert records == dict(enumerate(PAYLOADS[:whole]))
        if stop == (STARTS[whole] if whole < len(FRAMES) else len(FILE)):
            assert not damages
        else:
            (damage,) = damages
            assert (damage.record, damage.offset) == (whole, STARTS[whole])
            assert "bytes" in damage.expected and f"{stop - STARTS[whole]} bytes" == damage.found


@pytest.mark.parametrize("most", [11, 1 << 30])
def test_every_flipped_bit_costs_its_record_and_no_other(most: int):
    for bit in range(8 * len(FILE)):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        hit = max(number for number, start in enumerate(STARTS) if start <= bit // 8)
        records, damages = read(bytes(data), most)
        assert records == {number: p for number, p in enumerate(PAYLOADS) if number != hit}, bit
        (damage,) = damages
        assert (damage.shard, damage.record, damage.offset) == ("shard", hit, STARTS[hit])
        assert damage.lost_bytes == len(FRAMES[hit])


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 2**30 + 1, 2**32])
@pytest.mark.parametrize("with_crc", [True, False])
def test_hostile_lengths(length: int, with_crc: bool):
    raw = struct.pack("<Q", length)
    header = raw + struct.pack("<I", crc.masked_crc(raw) if with_crc else 12345)
    records, damages = read(FRAMES[0] + header + b"x" * 50 + FRAMES[2])
    assert records == {0: PAYLOADS[0], 2: PAYLOADS[2]}
    (damage,) = damages
    assert (damage.record, damage.offset) == (1, len(FRAMES[0])) and str(length) in damage.found


def test_records_larger_than_the_buffer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(framing, "_SCAN_BYTES", 64)
    payloads = [bytes([n]) * size for n, size in enumerate((10, 500, 0, 63, 64, 65, 2000, 5))]
    data = b"".join(frame(p) for p in payloads)
    assert read(data) == (dict(enumerate(payloads)), [])
    broken = bytearray(data)
    broken[3] ^= 16
    records, damages = read(bytes(broken))
    assert records == {n: p for n, p in enumerate(payloads) if n} and len(damages) == 1


def test_a_lost_frame_is_found_again_across_buffers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(framing, "_SCAN_BYTES", 64)
    for garbage in range(1, 200):
        records, damages = read(FRAMES[0] + b"\xff" * garbage + FRAMES[2] + FRAMES[3])
        assert records == {0: PAYLOADS[0], 2: PAYLOADS[2], 3: PAYLOADS[3]}
        assert [(d.record, d.lost_bytes) for d in damages] == [(1, garbage)]


@given(st.lists(st.integers(0, 90), min_size=1, max_size=120), st.integers(1, 9))
def test_chains_find_what_a_walk_finds(lengths: list[int], chain: int):
    frames = b"".join(frame(b"x" * length) for length in lengths)
    data = np.frombuffer(frames + bytes(framing.CHAIN_SLACK_BYTES), dtype=np.uint8)
    ends = framing.walk(data, 0, len(frames))
    assert np.array_equal(np.diff(ends) - 16, lengths)
    starts = ends[:-1:chain]
    counts = np.full(len(starts), chain)
    counts[-1] = len(lengths) - chain * (len(starts) - 1)
    found = framing.walk_chains(data, starts, np.append(starts[1:], ends[-1]), counts)
    assert found is not None and np.array_equal(found, ends)


def test_chains_notice_every_damaged_length():
    data = np.frombuffer(FILE + bytes(framing.CHAIN_SLACK_BYTES), dtype=np.uint8)
    ends = framing.walk(data, 0, len(FILE))
    for start in STARTS:
        for bit in range(64):
            broken = data.copy()
            broken[start + bit // 8] ^= 1 << bit % 8
            found = framing.walk_chains(broken, ends[:1], ends[-1:], np.array([len(STARTS)]))
            assert found is None or crc.find_bad_length_crc(broken, found) is not None


def test_find_header():
    assert framing.find_header(np.frombuffer(b"\x00" * 30 + FRAMES[0], dtype=np.uint8)) == 30
    assert framing.find_header(np.frombuffer(b"\x00" * 30, dtype=np.uint8)) is None
    assert framing.find_header(np.frombuffer(FRAMES[0][:11], dtype=np.uint8)) is None
