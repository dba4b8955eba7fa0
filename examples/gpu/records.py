"""Chess records as somebody reads them who has numpy alone: what PyTorch's and JAX's own loaders are given here.

::

    file ──walk the frames──► where each record is ──gather──► packed rows, shuffled ──unpack a batch──► floats

Nothing but the walk is done record by record. The CRCs are passed over. The order of the files is drawn anew each
time, and so is that of the records of a file.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = Any  # of numpy
ROW = np.dtype([("d", np.uint8, 194), ("s", np.int64)])
# Stored are six groups of four channels. Delivered: all first members, all second ones (negative), and so on.
CHANNEL_ORDER = np.arange(24).reshape(6, 4).T.ravel()
CHANNEL_SIGN = np.tile(np.repeat([1, -1], 6), 2).astype(np.int8)
SQUARES = np.arange(64)[:, np.newaxis]
BIT_ORDER, BIT_SIGN = (SQUARES * 24 + CHANNEL_ORDER).ravel(), np.tile(CHANNEL_SIGN, 64)


def packed_batches(paths: Sequence[str], batch_size: int, seed: int) -> Iterator[Array]:
    """Batches of rows, (batch_size,) of ``ROW``, without end; what is left of a file is completed from the next."""
    draw, rng, left = random.Random(seed), np.random.default_rng(seed), np.empty(0, ROW)
    while True:
        for path in draw.sample(paths, len(paths)):
            rows = read_rows(path)
            rows = np.concatenate([left, rows[rng.permutation(len(rows))]])
            whole = len(rows) // batch_size * batch_size
            yield from rows[:whole].reshape(-1, batch_size)
            left = rows[whole:]


def read_rows(path: str) -> Array:
    """The records of a TFRecord file: (n,) of ``ROW``."""
    data = Path(path).read_bytes()
    starts, lengths = walk(data)
    rows, stored, boards = np.empty(len(starts), ROW), np.frombuffer(data, np.uint8), np.empty_like(starts)
    for length in np.unique(lengths):  # records of one length are laid out alike
        group = np.flatnonzero(lengths == length)
        first = starts[group[0]]
        board, score, score_bytes = places(data[first : first + length])
        boards[group] = starts[group] + board
        rows["s"][group] = varints(sliding_window_view(stored, score_bytes)[starts[group] + score])
    rows["d"] = sliding_window_view(stored, 194)[boards]
    return rows


def walk(data: bytes) -> tuple[Array, Array]:
    """Where each record of a file begins, and its bytes: a frame is a length, its CRC, the record and its CRC."""
    frames, at, length_at = [], 0, struct.Struct("<Q").unpack_from
    while at < len(data):
        frames.append(at)
        at += length_at(data, at)[0] + 16
    starts = np.array([*frames, at]) + 12
    return starts[:-1], np.diff(starts) - 16


def places(example: bytes) -> tuple[int, int, int]:
    """Of a ``tf.train.Example``: where the bytes of ``d`` are, where the varint of ``s`` is, and its bytes."""
    board = example.index(b"\n\xc2\x01") + 3  # a field of 194 bytes
    rest = example[:board] + bytes(194) + example[board + 194 :]
    score = rest.index(b"\x1a", rest.index(b"\n\x01s")) + 4  # a list of integers
    return board, score, example[score - 1]


def varints(digits: Array) -> Array:
    """int64, (n,), of numbers of seven bits a byte: uint8, (n, bytes)."""
    values = np.zeros(len(digits), np.uint64)
    for place in range(digits.shape[1]):
        values |= (digits[:, place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def unpack(rows: Array) -> tuple[tuple[Array, Array], Array]:
    """``(board, flags), score`` of rows: float32, (n, 8, 8, 24), (n, 10) and (n,)."""
    bits = np.unpackbits(rows["d"], axis=1)
    # In order and signed as bytes, and floats last: a third of the time of doing that in floats.
    board = np.take(bits, BIT_ORDER, axis=1, mode="clip").view(np.int8) * BIT_SIGN
    flags, mate = bits[:, 1536:1546], bits[:, 1546] == 1
    size = np.abs(rows["s"])
    decided = np.sign(rows["s"]) * (0.8 + 0.2 / 49 * np.maximum(0, 50 - size))
    score = np.where(mate, decided, 0.8 * np.tanh(rows["s"] / 600))
    return (board.reshape(-1, 8, 8, 24).astype(np.float32), flags.astype(np.float32)), score.astype(np.float32)
