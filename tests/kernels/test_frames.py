"""Chains of frames: what a walk finds, and no damaged length unnoticed."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.kernels import crc
from loaderd.kernels import frames as walking
from loaderd.kernels.crc import framed
from tests.formats.shard_bytes import frames, starts_of
from tests.helpers.guarded import guarded
from tests.helpers.record_bytes import header

PAYLOADS = [b"first record", b"", b"third" * 9, b"\x00" * 40, b"fifth"]
FRAMES = [framed(payload) for payload in PAYLOADS]
*STARTS, _ = starts_of(PAYLOADS)
FILE = b"".join(FRAMES)


@pytest.fixture
def no_second_look(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled code finds must be enough for healthy shards."""
    if kernels == "compiled":
        monkeypatch.setattr(walking, "find_bad_length_crc", None)


def in_memory(data: bytes) -> npt.NDArray[np.uint8]:
    return guarded(data)


@pytest.mark.usefixtures("no_second_look")
@given(st.lists(st.integers(0, 90), min_size=1, max_size=120), st.integers(1, 9))
def test_chains_find_what_a_walk_finds(lengths: list[int], chain: int):
    data = frames([b"x" * length for length in lengths])
    buffer = in_memory(data)
    ends = walking.walk(buffer, 0, len(data))
    assert np.array_equal(np.diff(ends) - 16, lengths)
    starts = ends[:-1:chain]
    counts = np.full(len(starts), chain)
    counts[-1] = len(lengths) - chain * (len(starts) - 1)
    found = walking.walk_chains(buffer, starts, np.append(starts[1:], ends[-1]), counts)
    assert found is not None and np.array_equal(found, ends)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("length", [(1 << 16) - 1, 1 << 16])
def test_chains_of_long_records(length: int):
    data = frames([b"x", bytes(length), b"y"])
    starts, stop = np.array([0]), np.array([len(data)])
    found = walking.walk_chains(in_memory(data), starts, stop, np.array([3]))
    assert found is not None and np.diff(found).tolist() == [17, length + 16, 17]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("counts", [[0], [-1], [4, -1], [2, 0]])
def test_chains_of_a_broken_index_are_none(counts: list[int]):
    data = frames([b"x", b"yy", b"zzz"])
    ends = walking.walk(in_memory(data), 0, len(data))
    starts = ends[: len(counts)]
    found = walking.walk_chains(in_memory(data), starts, np.append(starts[1:], len(data)), np.array(counts))
    assert found is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chain", [1, 2, 5])
def test_chains_notice_every_damaged_header(chain: int):
    healthy = in_memory(FILE)
    ends = np.array([*STARTS, len(FILE)])
    starts = ends[:-1:chain]
    counts = np.minimum(chain, len(STARTS) - chain * np.arange(len(starts)))
    stops = np.append(starts[1:], len(FILE))
    assert walking.walk_chains(healthy, starts, stops, counts) is not None
    for start in STARTS:
        for bit in range(96):  # of a length, and of its CRC
            broken = healthy.copy()
            broken[start + bit // 8] ^= 1 << bit % 8
            assert walking.walk_chains(broken, starts, stops, counts) is None


@pytest.mark.usefixtures("kernels")
@given(
    which=st.integers(0, len(STARTS) - 1),
    length=st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 400), st.integers(-400, -1).map(lambda n: n % 2**64)),
    chain=st.integers(1, 5),
)
def test_a_length_that_leads_elsewhere_is_noticed(which: int, length: int, chain: int):
    """Its CRC is right, so it is followed: never out of the buffer."""
    buffer = in_memory(FILE)
    buffer[STARTS[which] :][:12] = np.frombuffer(header(length), np.uint8)
    starts = np.array(STARTS[::chain])
    counts = np.minimum(chain, len(STARTS) - chain * np.arange(len(starts)))
    found = walking.walk_chains(buffer, starts, np.append(starts[1:], len(FILE)), counts)
    assert (found is not None) == (length == len(PAYLOADS[which]))


@pytest.mark.usefixtures("kernels")
def test_a_chain_cannot_go_backwards():
    data = bytearray(120)
    for place, target in ((0, 64), (64, 32), (32, 120)):
        length = ((target - place - 16) % 2**64).to_bytes(8, "little")
        data[place : place + 12] = length + crc.masked_crc(length).to_bytes(4, "little")
    one, stop = np.array([0]), np.array([120])
    assert walking.walk_chains(in_memory(bytes(data)), one, stop, np.array([3])) is None


def frame_by_frame(data: bytes, start: int, stop: int) -> list[int]:
    ends = [start]
    while ends[-1] + 12 <= stop:
        head = data[ends[-1] : ends[-1] + 12]
        end = ends[-1] + int.from_bytes(head[:8], "little") + 16
        if crc.masked_crc(head[:8]) != int.from_bytes(head[8:], "little") or end > stop:
            break
        ends.append(end)
    return ends


@pytest.mark.usefixtures("kernels")
@given(
    lengths=st.lists(st.one_of(st.integers(0, 90), st.sampled_from([65_535, 65_536, 70_000])), max_size=30),
    begin=st.integers(0, 30),
    cut=st.one_of(st.just(0), st.integers(0, 200)),
    hit=st.none() | st.tuples(st.integers(0, 29), st.integers(0, 95)),
)
def test_a_walk_goes_to_what_is_broken(lengths: list[int], begin: int, cut: int, hit: tuple[int, int] | None):
    payloads = [b"x" * length for length in lengths]
    data = bytearray(frames(payloads))
    *starts, _ = starts_of(payloads)
    if hit is not None and hit[0] < len(starts):
        data[starts[hit[0]] + hit[1] // 8] ^= 1 << hit[1] % 8
    start = [*starts, len(data)][min(begin, len(starts))]
    stop = max(start, len(data) - cut)
    buffer = in_memory(bytes(data[:stop]))
    assert walking.walk(buffer, start, stop).tolist() == frame_by_frame(bytes(data), start, stop)


@pytest.mark.usefixtures("kernels")
def test_a_walk_stops_at_what_is_not_whole():
    data = np.frombuffer(FILE, dtype=np.uint8)
    for start, stop in itertools.combinations([*STARTS, len(FILE)], 2):
        expected = [place for place in [*STARTS, len(FILE)] if start <= place <= stop]
        for cut in (stop, min(stop + 7, len(FILE)), min(stop + 13, len(FILE))):
            assert walking.walk(data, start, cut).tolist() == [place for place in expected if place <= cut]
    hostile = np.frombuffer(FRAMES[0] + header(2**64 - 1) + b"x" * 50, dtype=np.uint8)
    assert walking.walk(hostile, 0, len(hostile)).tolist() == [0, len(FRAMES[0])]
