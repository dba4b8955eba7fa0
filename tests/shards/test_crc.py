"""One CRC call over a run of records says the same as one a record."""

from __future__ import annotations

import itertools
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.shards import crc


def run_of(payloads: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    data = bytearray()
    ends = [0]
    for payload in payloads:
        length = struct.pack("<Q", len(payload))
        data += length + struct.pack("<I", crc.masked_crc(length))
        data += payload + struct.pack("<I", crc.masked_crc(payload))
        ends.append(len(data))
    return np.frombuffer(data, dtype=np.uint8).copy(), np.array(ends)


def test_the_masked_crc_is_that_of_tensorflow(tmp_path):
    import tensorflow as tf

    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"some payload")
    assert path.read_bytes() == run_of([b"some payload"])[0].tobytes()


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_a_healthy_run(payloads: list[bytes]):
    buffer, ends = run_of(payloads)
    assert len(ends) < 2 or crc.find_bad_length_crc(buffer, ends) is None
    assert crc.check_data_crcs(buffer, ends) == []
    found = [buffer[s + 12 : e - 4].tobytes() for s, e in itertools.pairwise(ends)]
    assert found == payloads, "payloads stay as they are"


def test_every_flipped_bit_is_found():
    payloads = [b"abc", b"", b"0123456789", b"\x00" * 5]
    healthy, ends = run_of(payloads)
    for record in range(len(payloads)):
        for bit in range(8 * int(ends[record] + 12), 8 * int(ends[record + 1])):
            buffer = healthy.copy()
            buffer[bit // 8] ^= 1 << bit % 8
            ((found, stored, computed),) = crc.check_data_crcs(buffer, ends)
            assert found == record and stored != computed
        for bit in range(8 * int(ends[record]), 8 * int(ends[record] + 12)):
            buffer = healthy.copy()
            buffer[bit // 8] ^= 1 << bit % 8
            assert crc.find_bad_length_crc(buffer, ends) == record or bit // 8 - ends[record] < 8


def test_several_damages_at_once():
    payloads = [bytes([n]) * 20 for n in range(30)]
    buffer, ends = run_of(payloads)
    for record in (0, 3, 4, 29):
        buffer[ends[record] + 15] ^= 0x80
    assert [record for record, _, _ in crc.check_data_crcs(buffer, ends)] == [0, 3, 4, 29]


@given(st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**62)), min_size=1))
def test_crcs_of_lengths(lengths: list[int]):
    expected = [crc.masked_crc(struct.pack("<Q", length)) for length in lengths]
    assert crc.masked_crcs_of_lengths(np.array(lengths)).tolist() == expected
