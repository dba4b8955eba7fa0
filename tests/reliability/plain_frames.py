"""What is whole in a damaged TFRecord stream, found by looking at every byte."""

from __future__ import annotations

import numpy as np

from loaderd.kernels.crc import masked_crc


def headers_in(stream: bytes) -> dict[int, int]:
    """Where in ``stream`` a length with a right CRC stands, and where its record would end."""
    found = {}
    at = stream.find(bytes(4), 4)
    while 0 <= at <= len(stream) - 8:
        start = at - 4
        if masked_crc(stream[start : start + 8]) == int.from_bytes(stream[start + 8 : start + 12], "little"):
            found[start] = start + 16 + int.from_bytes(stream[start : start + 8], "little")
        at = stream.find(bytes(4), at + 1)
    return found


def valid_payloads(stream: bytes, headers: dict[int, int]) -> set[bytes]:
    """Every payload in ``stream`` with both CRCs right, wherever it stands."""
    return {
        stream[start + 12 : stop - 4]
        for start, stop in headers.items()
        if stop <= len(stream)
        and masked_crc(stream[start + 12 : stop - 4]) == int.from_bytes(stream[stop - 4 : stop], "little")
    }


def common_prefix(one: bytes, other: bytes) -> int:
    """How many bytes at the front are the same."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size))
    return int(differ[0]) if len(differ) else size
