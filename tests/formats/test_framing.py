"""Finding records and damage: every cut and every flipped bit of a small file, and hostile lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from guarded import guarded
from hypothesis import given
from hypothesis import strategies as st
from record_bytes import header
from shard_bytes import frames, payloads_of, reader, scanned, starts_of

from loaderd.errors import Damage
from loaderd.formats import crc, framing
from loaderd.formats.crc import framed

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


@pytest.mark.parametrize("most", [1, 7, 13, 1 << 30])
def test_any_way_of_reading_finds_the_same(most: int):
    assert scanned(FILE, most) == (dict(enumerate(PAYLOADS)), [])
    assert scanned(b"", most) == ({}, [])


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


def check_every_flipped_bit(most: int) -> None:
    for bit in range(8 * len(FILE)):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        hit = max(number for number, start in enumerate(STARTS) if start <= bit // 8)
        records, damages = scanned(bytes(data), most)
        assert records == {number: p for number, p in enumerate(PAYLOADS) if number != hit}, bit
        (damage,) = damages
        assert (damage.shard, damage.record, damage.offset) == ("shard", hit, STARTS[hit])
        assert damage.lost_bytes == len(FRAMES[hit])


def test_every_flipped_bit_costs_its_record_and_no_other():
    check_every_flipped_bit(1 << 30)


def test_every_flipped_bit_in_small_buffers(small_buffers: None):
    check_every_flipped_bit(11)


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


def test_numbers_behind_a_lost_stretch_count_it_as_one_record():
    data = FRAMES[0] + b"\xff" * (len(FRAMES[1]) + len(FRAMES[2])) + FRAMES[3] + FRAMES[4]
    records, (damage,) = scanned(data)
    assert records == {0: PAYLOADS[0], 2: PAYLOADS[3], 3: PAYLOADS[4]}
    assert (damage.record, damage.lost_bytes) == (1, len(FRAMES[1]) + len(FRAMES[2]))


def test_frames_in_the_payload_of_a_lost_record_are_taken_for_records():
    """What the module's docstring says is not sure: bytes that are frames cannot be told from frames."""
    data = bytearray(framed(FRAMES[0] + FRAMES[2]) + FRAMES[3])
    data[3] ^= 1
    records, damages = scanned(bytes(data))
    assert list(records.values()) == [PAYLOADS[0], PAYLOADS[2], PAYLOADS[3]] and damages


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 2**64 - 16, 2**64 - 40, 2**30 + 1, 2**32])
@pytest.mark.parametrize("with_crc", [True, False])
def test_hostile_lengths(length: int, with_crc: bool):
    head = bytearray(header(length))
    head[8] ^= not with_crc
    records, damages = scanned(FRAMES[0] + head + b"x" * 50 + FRAMES[2])
    assert records == {0: PAYLOADS[0], 2: PAYLOADS[2]}
    (damage,) = damages
    assert (damage.record, damage.offset) == (1, len(FRAMES[0])) and str(length) in damage.found


def test_a_record_of_the_greatest_length_that_is_cut():
    records, damages = scanned(FRAMES[0] + header(framing.MAX_RECORD_BYTES) + b"x" * 50)
    assert records == {0: PAYLOADS[0]}
    assert [(damage.record, damage.found) for damage in damages] == [(1, "62 bytes")]


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


@pytest.mark.parametrize("garbage", [(1 << 14) - 12, (1 << 14) - 11, (1 << 20) - 5, (1 << 20) + 1, 3 << 20])
def test_a_lost_frame_is_found_again_in_another_buffer(garbage: int):
    records, damages = scanned(FRAMES[0] + b"\x00" * garbage + FRAMES[2])
    assert records == {0: PAYLOADS[0], 2: PAYLOADS[2]}
    assert [(d.record, d.lost_bytes) for d in damages] == [(1, garbage)]


# ----------------------------------------------------------------------------------------- frames and nothing else


@pytest.fixture
def no_second_look(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled code finds must be enough for healthy shards."""
    if kernels == "compiled":
        monkeypatch.delattr(framing, "_walk_by_numpy")


def with_slack(data: bytes) -> npt.NDArray[np.uint8]:
    return guarded(data + bytes(framing.CHAIN_SLACK_BYTES))


@pytest.mark.usefixtures("no_second_look")
@given(st.lists(st.integers(0, 90), min_size=1, max_size=120), st.integers(1, 9))
def test_chains_find_what_a_walk_finds(lengths: list[int], chain: int):
    data = frames([b"x" * length for length in lengths])
    buffer = with_slack(data)
    ends = framing.walk(buffer, 0, len(data))
    assert np.array_equal(np.diff(ends) - 16, lengths)
    starts = ends[:-1:chain]
    counts = np.full(len(starts), chain)
    counts[-1] = len(lengths) - chain * (len(starts) - 1)
    found = framing.walk_chains(buffer, starts, np.append(starts[1:], ends[-1]), counts)
    assert found is not None and np.array_equal(found, ends)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("length", [(1 << 16) - 1, 1 << 16])
def test_chains_of_long_records(length: int):
    data = frames([b"x", bytes(length), b"y"])
    starts, stop = np.array([0]), np.array([len(data)])
    found = framing.walk_chains(with_slack(data), starts, stop, np.array([3]))
    assert found is not None and np.diff(found).tolist() == [17, length + 16, 17]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("counts", [[0], [-1], [4, -1], [2, 0]])
def test_chains_of_a_broken_index_are_none(counts: list[int]):
    data = frames([b"x", b"yy", b"zzz"])
    ends = framing.walk(with_slack(data), 0, len(data))
    starts = ends[: len(counts)]
    found = framing.walk_chains(with_slack(data), starts, np.append(starts[1:], len(data)), np.array(counts))
    assert found is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chain", [1, 2, 5])
def test_chains_notice_every_damaged_header(chain: int):
    healthy = with_slack(FILE)
    ends = np.array([*STARTS, len(FILE)])
    starts = ends[:-1:chain]
    counts = np.minimum(chain, len(STARTS) - chain * np.arange(len(starts)))
    stops = np.append(starts[1:], len(FILE))
    assert framing.walk_chains(healthy, starts, stops, counts) is not None
    for start in STARTS:
        for bit in range(96):  # of a length, and of its CRC
            broken = healthy.copy()
            broken[start + bit // 8] ^= 1 << bit % 8
            assert framing.walk_chains(broken, starts, stops, counts) is None


@pytest.mark.usefixtures("kernels")
@given(
    which=st.integers(0, len(STARTS) - 1),
    length=st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 400), st.integers(-400, -1).map(lambda n: n % 2**64)),
    chain=st.integers(1, 5),
)
def test_a_length_that_leads_elsewhere_is_noticed(which: int, length: int, chain: int):
    """Its CRC is right, so it is followed: never out of the buffer."""
    buffer = with_slack(FILE)
    buffer[STARTS[which] :][:12] = np.frombuffer(header(length), np.uint8)
    starts = np.array(STARTS[::chain])
    counts = np.minimum(chain, len(STARTS) - chain * np.arange(len(starts)))
    found = framing.walk_chains(buffer, starts, np.append(starts[1:], len(FILE)), counts)
    assert (found is not None) == (length == len(PAYLOADS[which]))


@pytest.mark.usefixtures("kernels")
def test_a_chain_cannot_go_backwards():
    data = bytearray(120)
    for place, target in ((0, 64), (64, 32), (32, 120)):
        length = ((target - place - 16) % 2**64).to_bytes(8, "little")
        data[place : place + 12] = length + crc.masked_crc(length).to_bytes(4, "little")
    one, stop = np.array([0]), np.array([120])
    assert framing.walk_chains(with_slack(bytes(data)), one, stop, np.array([3])) is None


def test_a_walk_stops_at_what_is_not_whole():
    data = np.frombuffer(FILE, dtype=np.uint8)
    for start, stop in itertools.combinations([*STARTS, len(FILE)], 2):
        expected = [place for place in [*STARTS, len(FILE)] if start <= place <= stop]
        for cut in (stop, min(stop + 7, len(FILE)), min(stop + 13, len(FILE))):
            assert framing.walk(data, start, cut).tolist() == [place for place in expected if place <= cut]
    hostile = np.frombuffer(FRAMES[0] + header(2**64 - 1) + b"x" * 50, dtype=np.uint8)
    assert framing.walk(hostile, 0, len(hostile)).tolist() == [0, len(FRAMES[0])]


def test_find_header():
    def find(data: bytes) -> int | None:
        return framing.find_header(np.frombuffer(data, dtype=np.uint8))

    assert find(b"\x00" * 30 + FRAMES[0]) == 30
    assert find(b"\x00" * 30) is None
    assert find(b"") is None
    assert find(FRAMES[0][:11]) is None
    assert find(FRAMES[0][:12]) == 0
    assert find(header(70_000) + FRAMES[0]) == 0
    assert find(header(framing.MAX_RECORD_BYTES) + FRAMES[0]) == 0
    assert find(header(framing.MAX_RECORD_BYTES + 1) + FRAMES[0]) == 12
    assert crc.masked_crc(bytes(8)) != 0, "zeros are no header"
