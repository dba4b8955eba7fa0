"""Finding the records of a shard: where each starts, which are damaged, and where reading can go on.

A TFRecord stream is a sequence of frames (tensorflow/core/lib/io/record_writer.h)::

    uint64 length │ uint32 masked crc of length │ data[length] │ uint32 masked crc of data

:func:`scan` reads a stream from front to back, in pieces, and checks both CRCs of every record. A record with a
bad data CRC is damage of that record alone. Where a length is damaged the framing is lost; the scan then searches
for the next twelve bytes that are a length with a matching CRC, and goes on there.

A length whose CRC matches may be wrong, too: bytes are missing behind it, or it was forged. That shows where the data
CRC does not match and no frame follows, or where the stream ends before the record does. Then the search begins a
byte behind the start of that record, so that records within the wrong length are found.

What is sure, and what is not: a change of up to 32 bits in a row, of data or of a CRC, is always found, a larger one
is missed once in 2³². A lost stretch counts as one record. If it held several, the numbers of the records behind it
are too small; if bytes were inserted, too large. And if a payload holds TFRecord frames itself and is searched,
because a length is damaged or wrong, then the frames in it are found and taken for records.

A record of a wrong length is read to its end, and then searched from its start. A file that was made of nothing but
wrong lengths would be read again for each of them. So a scan ends where it has read far more than it has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.errors import Damage
from loaderd.kernels.crc import (
    FOOTER_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    Bytes1D,
    check_data_crcs,
    mask,
    masked_crc,
    masked_crcs_of_lengths,
)
from loaderd.kernels.frames import Ends, walk

MAX_RECORD_BYTES = 1 << 30
TOO_LARGE = f"a record of at most {MAX_RECORD_BYTES} bytes"
"""What the damage expects that stands for a whole record of more bytes."""
_SCAN_BYTES = 1 << 20
# Bytes are missing, as a rule, in one place of a file or in a few, and what is read in vain there is one record.
_MOST_AGAIN, _ANY_AGAIN_BYTES = 8, 256 << 20
_SEEK_BYTES = 1 << 14

ReadInto = Callable[[memoryview], int]
JumpTo = Callable[[int], bool]


class RecordChunk(NamedTuple):
    """Consecutive records of a stream, in memory.

    ``buffer``: uint8; valid until the scan goes on. ``ends``: int64, (n + 1,): where in the buffer each frame
    starts, and where the last one ends. ``offset``: where in the stream ``ends[0]`` is. ``first_record``: the number
    of the first of them in the stream. ``bad``: which of them (from 0) have a damaged payload. ``header_bytes`` and
    ``footer_bytes`` are those of each frame; records of fixed size have none.
    """

    buffer: Bytes1D
    ends: Ends
    offset: int
    first_record: int
    bad: tuple[int, ...] = ()
    header_bytes: int = HEADER_BYTES
    footer_bytes: int = FOOTER_BYTES

    @property
    def num_records(self) -> int:
        """Records of the piece, damaged payloads included."""
        return len(self.ends) - 1

    @property
    def stop_offset(self) -> int:
        """Where in the stream the last frame ends."""
        return self.offset + int(self.ends[-1] - self.ends[0])

    @property
    def payload_starts(self) -> Ends:
        """int64, (n,): where in the buffer each record's data starts."""
        return self.ends[:-1] + self.header_bytes

    @property
    def payload_lengths(self) -> Ends:
        """int64, (n,): bytes of each record's data."""
        return np.diff(self.ends) - self.header_bytes - self.footer_bytes


def scan(
    shard: str,
    read_into: ReadInto,
    *,
    first_record: int = 0,
    first_offset: int = 0,
    most_bytes: int = MAX_RECORD_BYTES,
    jump_to: JumpTo | None = None,
) -> Iterator[RecordChunk | Damage]:
    """Every record and every damage of a stream, in order, both CRCs checked.

    ``read_into(view)`` fills a memoryview from the stream and returns the number of bytes (0 at the end). The stream
    begins with record ``first_record`` of the shard, at byte ``first_offset``. Records that a :class:`Damage` names
    are in no :class:`RecordChunk`, or are ``bad`` in the one that follows.

    A record of more than ``most_bytes`` is damage: it would have to be in memory whole. ``jump_to(offset)`` goes on
    at an offset of the stream, if a frame begins or the stream ends there, and tells whether. Without it, the end of
    a record that is too large is searched for.
    """
    scanned = _ScanBuffer(read_into, first_offset, most_bytes, jump_to)
    record = first_record
    while scanned.fill():
        if scanned.is_hopeless:
            found = f"{scanned.wrong_lengths} wrong lengths with right CRCs"
            yield Damage(shard, record, scanned.offset, "records, each behind the one before", found, lost_bytes=-1)
            return
        ends = walk(scanned.buffer, scanned.start, scanned.stop)
        if len(ends) > 1:
            offset = scanned.offset
            bad = check_data_crcs(scanned.buffer, ends)
            lost = np.diff(ends)
            if bad and bad[-1][0] == len(ends) - 2:
                ends, lost[-1] = _look_behind(scanned, ends, bad[-1][1])
            advance = int(lost.sum())
            damages = [
                Damage(
                    shard,
                    record + index,
                    offset + int(ends[index] - ends[0]),
                    f"data with CRC32C {stored:#010x}",
                    f"{found:#010x}",
                    lost_bytes=int(lost[index]),
                )
                for index, stored, found in bad
            ]
            again_bytes = int(ends[-1] - ends[0]) - advance
            lies = damages[-1:] if again_bytes > 0 else []
            if lies:
                scanned.note_read_again(again_bytes)
            named = damages[: len(damages) - len(lies)]
            ends = ends[: len(ends) - len(lies)]
            yield from named
            if len(ends) > 1:
                yield RecordChunk(
                    scanned.buffer, ends, offset, record, tuple(damage.record - record for damage in named)
                )
            yield from lies
            record += len(ends) - 1 + len(lies)
            scanned.advance(advance)
            continue
        damage = _step_over(shard, scanned, record)
        if damage is None:
            continue
        yield damage
        record += 1


class _ScanBuffer:
    """Where a scan is: ``buffer[start:stop]`` holds the bytes of the stream from ``offset`` on."""

    def __init__(self, read_into: ReadInto, offset: int, most_bytes: int, jump_to: JumpTo | None) -> None:
        self._read_into = read_into
        self._jump_to = jump_to
        self._ended = False
        self.most_bytes = most_bytes
        self.buffer: Bytes1D = np.empty(_SCAN_BYTES, dtype=np.uint8)
        self.start = 0
        self.stop = 0
        self.offset = self._first_offset = offset
        self.wrong_lengths = self._again_bytes = 0

    def note_read_again(self, num_bytes: int) -> None:
        """A record has a wrong length: so many of its bytes are searched, and read again."""
        self.wrong_lengths += 1
        self._again_bytes += max(num_bytes, _SEEK_BYTES)  # the calls for a small one take as long

    @property
    def is_hopeless(self) -> bool:
        passed_bytes = self.offset - self._first_offset
        return self._again_bytes > _ANY_AGAIN_BYTES + _MOST_AGAIN * passed_bytes

    def __len__(self) -> int:
        return self.stop - self.start

    def fill(self, wanted_bytes: int = 0) -> bool:
        """Read on until the buffer is full (or holds ``wanted_bytes``); False once nothing at all is left."""
        # To move what is left, each time that a little of it was used, would take time that grows as its square.
        if self._ended or len(self) >= max(_SCAN_BYTES // 2, wanted_bytes):
            return len(self) > 0
        capacity = max(_SCAN_BYTES, wanted_bytes)
        if self.start or capacity > len(self.buffer):
            old = self.buffer[self.start : self.stop]
            if capacity > len(self.buffer):
                self.buffer = np.empty(capacity, dtype=np.uint8)
            self.buffer[: len(old)] = old.copy() if old.base is self.buffer else old
            self.start, self.stop = 0, len(old)
        view = self.buffer.data
        while not self._ended and self.stop < capacity:
            got = self._read_into(view[self.stop : capacity])
            self.stop += got
            self._ended = got == 0
        return len(self) > 0

    def advance(self, num_bytes: int) -> None:
        self.start += num_bytes
        self.offset += num_bytes

    def jump_to(self, offset: int) -> bool:
        """Go on at an offset behind all that the buffer holds; False where no frame begins there, or nobody knows."""
        if self._jump_to is None or not self._jump_to(offset):
            return False
        self.start = self.stop = 0
        self.offset = offset
        return True


def _look_behind(scanned: _ScanBuffer, ends: Ends, stored: int) -> tuple[Ends, int]:
    """Where the next frame begins behind the last record of ``ends``, whose data is damaged: maybe not at its end.

    Returns the ends, which may lie elsewhere in the buffer now, and how many bytes behind the last record's start
    the next frame begins. ``stored``: what :func:`check_data_crcs` has put in place of the record's masked CRC.
    """
    scanned.fill(wanted_bytes=int(ends[-1] - ends[0]) + HEADER_BYTES)
    ends = ends - ends[0] + scanned.start
    start, stop = int(ends[-2]), int(ends[-1])
    if find_header(scanned.buffer[stop : min(stop + HEADER_BYTES, scanned.stop)]) is not None:
        return ends, stop - start
    footer = scanned.buffer[stop - FOOTER_BYTES : stop]
    unmasked = footer.copy()
    footer[:] = np.frombuffer(mask(stored).to_bytes(FOOTER_BYTES, "little"), dtype=np.uint8)
    header = _find_between(scanned.buffer, start + 1, min(stop + HEADER_BYTES - 1, scanned.stop))
    if header is not None:
        return ends, header - start
    footer[:] = unmasked
    return ends, stop - start


def _step_over(shard: str, scanned: _ScanBuffer, record: int) -> Damage | None:
    """Get past a frame that is not whole in the buffer: None if more bytes made it whole, else the damage."""
    scanned.fill()
    start = scanned.offset
    header = scanned.buffer[scanned.start : scanned.stop][:HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        damage = Damage(
            shard, record, start, f"a header of {HEADER_BYTES} bytes", f"{len(header)} bytes", len(header)
        )
        scanned.advance(len(header))
        return damage
    length = int.from_bytes(header[:8].tobytes(), "little")
    stored = int.from_bytes(header[8:].tobytes(), "little")
    computed = masked_crc(header[:8])
    if stored == computed and length <= scanned.most_bytes:
        scanned.fill(wanted_bytes=length + FRAME_BYTES)
        if len(scanned) >= length + FRAME_BYTES:
            return None
        left = len(scanned)
        following = _find_between(scanned.buffer, scanned.start + 1, scanned.stop)
        scanned.advance(left if following is None else following - scanned.start)
        scanned.note_read_again(len(scanned))
        expected = f"a record of {length + FRAME_BYTES} bytes"
        return Damage(shard, record, start, expected, f"{left} bytes", scanned.offset - start)
    stop = start + length + FRAME_BYTES
    if stored != computed:
        _seek_header(scanned)
        expected, found = f"a length with masked CRC32C {stored:#010x}", f"length {length} with {computed:#010x}"
    elif scanned.jump_to(stop) or _seek_header(scanned) == stop:
        expected, found = TOO_LARGE, f"a whole one of {length} bytes"
        if scanned.most_bytes < MAX_RECORD_BYTES:
            expected = f"a record of at most {scanned.most_bytes} bytes in a compressed file of this size"
    else:
        expected, found = f"a length of at most {scanned.most_bytes} bytes", f"{length}"
    return Damage(shard, record, start, expected, found, lost_bytes=scanned.offset - start)


def _seek_header(scanned: _ScanBuffer) -> int:
    """Go to the next bytes that are a length with a matching CRC, or to the end of the stream; returns the offset."""
    scanned.advance(1)
    while len(scanned) >= HEADER_BYTES or scanned.fill():
        # In steps: as a rule the next header is near, and to search the whole buffer takes 4 ms.
        part = scanned.buffer[scanned.start : scanned.stop][:_SEEK_BYTES]
        place = find_header(part)
        if place is not None:
            scanned.advance(place)
            break
        scanned.advance(len(part) - HEADER_BYTES + 1 if len(part) >= HEADER_BYTES else len(part))
    return scanned.offset


def _find_between(buffer: Bytes1D, start: int, stop: int) -> int | None:
    """Where the first header that lies wholly in ``buffer[start:stop]`` begins, or None."""
    for first in range(start, stop, _SEEK_BYTES):
        place = find_header(buffer[first : min(first + _SEEK_BYTES + HEADER_BYTES - 1, stop)])
        if place is not None:
            return first + place
    return None


def find_header(buffer: Bytes1D) -> int | None:
    """Where in ``buffer`` (uint8) the first plausible length with a matching CRC stands, or None."""
    last = len(buffer) - HEADER_BYTES + 1
    if last <= 0 or not buffer.any():  # zeros alone are no header, and may go on for long
        return None
    words: npt.NDArray[np.uint32] = np.ndarray((len(buffer) - 3,), "<u4", buffer=buffer.data, strides=(1,))
    # A length below 4 GiB has four zero bytes at its end: this leaves few places to compute a CRC for.
    candidates = np.flatnonzero(words[4 : 4 + last] == 0)
    candidates = candidates[words[candidates] <= MAX_RECORD_BYTES]
    if not len(candidates):
        return None
    hits = candidates[masked_crcs_of_lengths(words[candidates].astype(np.int64)) == words[candidates + 8]]
    return int(hits[0]) if len(hits) else None
