"""One CRC call over a run of records says the same as one a record."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from loaderd.kernels import crc
from loaderd.kernels.crc import framed
from tests.formats.shard_bytes import frames, starts_of
from tests.helpers.guarded import guarded

pytestmark = pytest.mark.usefixtures("kernels")

Run = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def run_of(payloads: list[bytes]) -> Run:
    return guarded(frames(payloads)), np.array(starts_of(payloads))


def payloads_in(run: Run) -> list[bytes]:
    buffer, ends = run
    return [buffer[start + 12 : stop - 4].tobytes() for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("payload", [b"some payload", b"", b"\x00", bytes(range(256)) * 300], ids=len)
def test_the_masked_crc_is_that_of_tensorflow(tmp_path: Path, payload: bytes):
    import tensorflow as tf

    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(payload)
    assert path.read_bytes() == framed(payload)


def test_the_crc_of_the_standard():
    """RFC 3720, B.4: 32 bytes of zeros, of ones, and counted up."""
    for data, expected in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        masked = crc.masked_crc(data)
        rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
        assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == expected


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_a_healthy_run(payloads: list[bytes]):
    buffer, ends = run_of(payloads)
    assert crc.find_bad_length_crc(buffer, ends) == len(payloads)
    assert crc.check_data_crcs(buffer, ends) == []
    assert payloads_in((buffer, ends)) == payloads, "payloads stay as they are"


def test_a_run_in_the_middle_of_a_buffer_leaves_the_rest_alone():
    payloads = [b"abc", b"", b"0123456789"]
    buffer, ends = run_of(payloads)
    around = np.full(len(buffer) + 60, 0xA5, dtype=np.uint8)
    around[30:-30] = buffer
    assert crc.find_bad_length_crc(around, ends + 30) == 3
    assert crc.check_data_crcs(around, ends + 30) == []
    assert set(around[:30]) == set(around[-30:]) == {0xA5}


def test_every_flipped_bit_is_found():
    payloads = [b"abc", b"", b"0123456789", b"\x00" * 5]
    healthy, ends = run_of(payloads)
    for record, (start, stop) in enumerate(itertools.pairwise(ends.tolist())):
        for bit in range(8 * start, 8 * stop):
            buffer = healthy.copy()
            buffer[bit // 8] ^= 1 << bit % 8
            where = bit // 8 - start
            if where < 8:  # `ends` says what the lengths are; that they are no other is for a walk to say
                assert crc.find_bad_length_crc(buffer, ends) == 4
            elif where < 12:
                assert crc.find_bad_length_crc(buffer, ends) == record
            else:
                damaged = payloads_in((buffer, ends))
                ((found, stored, computed),) = crc.check_data_crcs(buffer, ends)
                assert found == record and computed == crc32c(damaged[record])
                assert (stored == crc32c(payloads[record])) == (bit // 8 < stop - 4)
                assert payloads_in((buffer, ends)) == damaged


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    hits=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 255)), max_size=8),
)
def test_several_damages_at_once(lengths: list[int], hits: list[tuple[int, int]]):
    payloads = [bytes([number % 256]) * length for number, length in enumerate(lengths)]
    buffer, ends = run_of(payloads)
    healthy = buffer.copy()
    for place, change in hits:
        record = place % len(lengths)
        # Somewhere in the record's data or the CRC behind it.
        buffer[int(ends[record]) + 12 + place % (lengths[record] + 4)] ^= change
    damaged = [r for r, (s, e) in enumerate(itertools.pairwise(ends)) if (buffer[s:e] != healthy[s:e]).any()]
    kept = payloads_in((buffer, ends))
    assert [record for record, _, _ in crc.check_data_crcs(buffer, ends)] == damaged
    assert payloads_in((buffer, ends)) == kept


def test_the_first_bad_length_is_named():
    buffer, ends = run_of([b"x" * length for length in (3, 70_000, 0, 65_535, 65_536, 5)])
    assert crc.find_bad_length_crc(buffer, ends) == 6
    for record in (5, 4, 1):
        buffer[int(ends[record]) + 10] ^= 0x10
        assert crc.find_bad_length_crc(buffer, ends) == record
    assert crc.check_data_crcs(buffer, ends) == []


@given(st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**64 - 1)), min_size=1))
def test_crcs_of_lengths(lengths: list[int]):
    expected = [crc.masked_crc(struct.pack("<Q", length)) for length in lengths]
    found = crc.masked_crcs_of_lengths(np.array(lengths, dtype=np.uint64).view(np.int64))
    assert found.dtype == np.uint32 and found.tolist() == expected


def test_frames_outside_of_the_buffer_are_refused():
    buffer, ends = run_of([b"abc", b"", b"0123456789"])
    for wrong in (ends + 1, ends - 1, ends[::-1], np.array([0, 15, 31])):
        with pytest.raises(IndexError, match="must follow each other within"):
            crc.check_data_crcs(buffer, wrong)
