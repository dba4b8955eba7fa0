"""Chess records read and unpacked as someone at home in numpy writes it by hand, without a library for TFRecords.

::

    file ──walk the framing──► where each record starts, how long it is ──gather──► rows ──unpack──► fields

Records of one length are laid out alike (true of shards that one program wrote), so that the place of each feature
is looked up once a length, and everything but the walk is done for all records at once.
"""

from __future__ import annotations

import gzip
import itertools
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.interface import Config
from harness.reference import CHANNEL_ORDER, CHANNEL_SIGN, VALUE_A, VALUE_B, VALUE_K
from numpy.lib.stride_tricks import sliding_window_view

BOARD_BYTES = 194
ROW = np.dtype([("d", np.uint8, BOARD_BYTES), ("s", np.int64)])  # a record, packed
HEADER_BYTES, FOOTER_BYTES = 12, 4  # of TFRecord's framing: the length and its CRC; the CRC of the record

_LENGTH = struct.Struct("<Q")
_INFLATE = {"": bytes, "GZIP": gzip.decompress, "ZLIB": zlib.decompress}
_SQUARES = np.arange(64)[:, np.newaxis]
_BIT_ORDER = (_SQUARES * 24 + CHANNEL_ORDER).ravel()  # of the board's 1536 bits, the stored place of each
_BIT_SIGN = np.tile(CHANNEL_SIGN, 64).astype(np.int8)

Rows = npt.NDArray[Any]  # of ROW, (n,)
Places = npt.NDArray[np.int64]


def workers_of(config: Config) -> int:
    """How many workers share the files out: none of them is without a file."""
    return min(config.workers, len(config.shards))


def paths(config: Config, worker: int = 0, num_workers: int = 1) -> Iterator[str]:
    """The files of all epochs, one after the other: of several workers', every one that is ``worker``'s."""
    own = config.shards[worker::num_workers]
    if not own:
        return
    for _ in itertools.count() if config.epochs is None else range(config.epochs):
        yield from own


def read_file(path: str, compression: str) -> bytes:
    return _INFLATE[compression](Path(path).read_bytes())


def walk(data: bytes) -> tuple[Places, Places]:
    """Where each record of a file starts and how many bytes it has: int64, (n,) each. CRCs are passed over."""
    headers: list[int] = []
    header, end, read_length = 0, len(data), _LENGTH.unpack_from
    while header < end:
        headers.append(header)
        header += read_length(data, header)[0] + HEADER_BYTES + FOOTER_BYTES
    starts = np.fromiter(headers, np.int64, len(headers)) + HEADER_BYTES  # half the time of np.array
    return starts, np.diff(starts, append=header + HEADER_BYTES) - HEADER_BYTES - FOOTER_BYTES


def parse(data: bytes, starts: Places, lengths: Places) -> Rows:
    """The records of ``data`` that are at ``starts`` and have so many bytes, as rows."""
    rows = np.empty(len(starts), ROW)
    if not len(rows):
        return rows
    array = np.frombuffer(data, np.uint8)
    boards = np.empty_like(starts)
    for length in np.flatnonzero(np.bincount(lengths)):
        group = np.flatnonzero(lengths == length)
        first = starts[group[0]]
        board, score, varint_bytes = _places(data[first : first + length])
        boards[group] = starts[group] + board
        rows["s"][group] = _varints(sliding_window_view(array, varint_bytes)[starts[group] + score])
    rows["d"] = sliding_window_view(array, BOARD_BYTES)[boards]
    return rows


def row_of(example: bytes) -> tuple[bytes, int]:
    """The board and the score of one record."""
    board, score, varint_bytes = _places(example)
    value = 0
    for place in range(varint_bytes):
        value |= (example[score + place] & 0x7F) << 7 * place
    return example[board : board + BOARD_BYTES], value - (value >> 63 << 64)


def _places(example: bytes) -> tuple[int, int, int]:
    """Of a serialized Example: where the bytes of ``d`` are, where the varint of ``s`` is, and its bytes."""
    board = example.index(b"\n\xc2\x01") + 3  # the tag of bytes_list's value, and 194 as a varint
    blank = example[:board] + bytes(BOARD_BYTES) + example[board + BOARD_BYTES :]
    score = blank.index(b"\x1a", blank.index(b"\n\x01s")) + 4  # int64_list: tag, length, the values' tag and length
    return board, score, example[score - 1]


def _varints(digits: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """int64, (n,), of varints of one width: uint8, (n, width)."""
    values = np.zeros(len(digits), np.uint64)
    for place in range(digits.shape[1]):
        values |= (digits[:, place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def read_rows(path: str, compression: str) -> Rows:
    data = read_file(path, compression)
    return parse(data, *walk(data))


def cut(rows: Rows, batch_size: int) -> tuple[list[Rows], Rows]:
    """Whole batches of ``rows``, and what is left."""
    whole = len(rows) // batch_size * batch_size
    return [rows[first : first + batch_size] for first in range(0, whole, batch_size)], rows[whole:]


def batches(config: Config, worker: int = 0, num_workers: int = 1) -> Iterator[Rows]:
    """The rows of a worker's files in batches; what is left of a file is completed from the next."""
    left = np.empty(0, ROW)
    for path in paths(config, worker, num_workers):
        whole, left = cut(np.concatenate([left, read_rows(path, config.compression)]), config.batch_size)
        yield from whole
    if len(left):
        yield left


def unpack(rows: Rows, dtype: str, board: npt.NDArray[Any] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The fields of a batch, as C-contiguous arrays. ``board``, (n, 8, 8, 24), is written to instead of a new one.

    The channels are put in order as bytes and signed as int8, and become ``dtype`` last: a third of the time of
    doing it in floats.
    """
    if board is None:
        board = np.empty((len(rows), 8, 8, 24), dtype)
    bits = np.unpackbits(rows["d"], axis=1)
    ordered = np.take(bits, _BIT_ORDER, axis=1, mode="clip").view(np.int8)  # "raise", the default, is slower
    ordered *= _BIT_SIGN
    board[...] = ordered.reshape(board.shape)

    size = np.abs(rows["s"].astype(np.float64))
    decided = VALUE_A + (1.0 - VALUE_A) / (VALUE_B - 1.0) * np.maximum(0.0, VALUE_B - size)
    score = np.where(bits[:, 1546] == 1, np.sign(rows["s"]) * decided, VALUE_A * np.tanh(rows["s"] / VALUE_K))
    return {"board": board, "flags": bits[:, 1536:1546].astype(dtype), "score": score.astype(np.float32)}
