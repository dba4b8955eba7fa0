"""Leela Chess Zero's files, as ``tf/chunkparser.py`` of LeelaChessZero/lczero-training reads them.

::

    a process: names of games, shuffled ──queue──► worker: gzip ──► record ──send_bytes──┐
                                        ──queue──► worker: gzip ──► record ──send_bytes──┴─► parent: shuffle buffer
                                                     ──► a record unpacked in numpy, bytes joined ──► batch

Written anew after its description and its steps. Each record is asked whether "diff focus" keeps it, which by default
it does, and the search's own evaluation is unpacked, though the schema does not deliver it. A game is read from its
place in the tar, where their users unpack the tars first; and their training would copy each batch once more, in
``tf.io.decode_raw``.
"""

from __future__ import annotations

import gzip
import io
import itertools
import multiprocessing
import os
import random
import struct
import tarfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from harness.interface import Config, Step

NOTE = "the gzip files' CRCs are checked"

LC0 = "loaderd.schemas:lc0"
RECORD = struct.Struct("<4sI7432s832sBBBBBBBb15fIHH4H")
BUFFER_RECORDS = 524_288  # as in its tf/configs/example.yaml
RECORDS_PER_READ = 256
QUEUED_GAMES = 4096
FOCUS_MIN, FOCUS_SLOPE, FOCUS_Q, FOCUS_POLICY = 1, 0, 6.0, 3.5

Game = tuple[str, int, int]  # a tar, and where in it the game's file is, and its bytes
Fields = tuple[bytes, bytes, bytes, bytes, bytes]  # the last is not delivered

_FLAT = [np.full(64, value, np.float32).tobytes() for value in (0, 1)]


def cannot(config: Config) -> str | None:
    if config.schema != LC0 or config.packed or config.dtype != Config.dtype:
        return f"it is written for the fields of {LC0} in float32"
    return None


def games_of(tar: str) -> list[Game]:
    with tarfile.open(tar, "r:") as members:
        return [(tar, info.offset_data, info.size) for info in members if info.name.endswith(".gz")]


def _name_games(games: list[Game], epochs: int | None, workers: int, queue: Queue[Game | None]) -> None:
    for _ in itertools.count() if epochs is None else range(epochs):
        random.shuffle(games)
        for game in games:
            queue.put(game)
    for _ in range(workers):
        queue.put(None)


def _work(queue: Queue[Game | None], writer: Connection) -> None:
    while (game := queue.get()) is not None:
        path, offset, num_bytes = game
        with open(path, "rb") as tar:
            stored = io.BytesIO(os.pread(tar.fileno(), num_bytes, offset))
        with gzip.open(stored, "rb") as file:
            while data := file.read(RECORDS_PER_READ * RECORD.size):
                for start in range(0, len(data), RECORD.size):
                    record = data[start : start + RECORD.size]
                    if _is_kept(record):
                        writer.send_bytes(record)
    writer.close()


def _is_kept(record: bytes) -> bool:
    """Its "diff focus", with the defaults: all are kept, but each is asked."""
    (best_q,) = struct.unpack("f", record[8284:8288])
    (orig_q,) = struct.unpack("f", record[8328:8332])
    (policy_kld,) = struct.unpack("f", record[8348:8352])
    if np.isnan(orig_q) or policy_kld <= 0:
        return True
    threshold = FOCUS_MIN + FOCUS_SLOPE * (FOCUS_Q * abs(best_q - orig_q) + policy_kld) / (FOCUS_Q + FOCUS_POLICY)
    return threshold >= 1.0 or random.random() <= threshold


def _receive(readers: list[Connection]) -> Iterator[bytes]:
    """A record of each worker in turn, until all have ended."""
    while readers:
        for reader in list(readers):
            try:
                yield reader.recv_bytes()
            except EOFError:
                readers.remove(reader)


def _shuffle(records: Iterator[bytes], buffer_records: int) -> Iterator[bytes | bytearray]:
    """Each record takes the place of a random one of the buffer, which goes on instead."""
    size = RECORD.size
    buffer, used = bytearray(size * buffer_records), 0
    item: bytes | bytearray
    for item in records:
        if used:
            place = random.randint(0, used - 1) * size
            buffer[place : place + size], item = item, buffer[place : place + size]
        if used < buffer_records:
            buffer[used * size : (used + 1) * size] = item
            used += 1
        else:
            yield item
    while used:
        used -= 1
        yield buffer[used * size : (used + 1) * size]


def _convert(record: bytes | bytearray) -> Fields:
    """Of a record of input format 1, each as the bytes of its float32: planes, policy, wdl, plies_left, best_q."""
    _, input_format, policy, bits, us_ooo, us_oo, them_ooo, them_oo, side, rule50, *rest = RECORD.unpack(record)
    _, _, _, best_q, _, best_d, _, _, plies_left, result_q, result_d, *_ = rest
    assert input_format == 1
    planes = np.unpackbits(np.frombuffer(bits, np.uint8)).astype(np.float32).tobytes()
    rights = _FLAT[us_ooo] + _FLAT[us_oo] + _FLAT[them_ooo] + _FLAT[them_oo] + _FLAT[side]
    planes = planes + rights + struct.pack("f", rule50 / 99.0) * 64 + _FLAT[0] + _FLAT[1]
    wdl = struct.pack("fff", 0.5 * (1.0 - result_d + result_q), result_d, 0.5 * (1.0 - result_d - result_q))
    best = struct.pack("fff", 0.5 * (1.0 - best_d + best_q), best_d, 0.5 * (1.0 - best_d - best_q))
    return planes, policy, wdl, struct.pack("f", plies_left), best


_SHAPES: dict[str, tuple[int, ...]] = {"planes": (112, 8, 8), "policy": (1858,), "wdl": (3,), "plies_left": ()}


def _batch(records: list[Fields]) -> dict[str, Any]:
    joined = [b"".join(column) for column in zip(*records, strict=True)]
    fields: dict[str, Any] = {
        name: np.frombuffer(data, np.float32).reshape(len(records), *shape)
        for (name, shape), data in zip(_SHAPES.items(), joined, strict=False)
    }
    return {**fields, "version": np.full(len(records), 6, np.int32)}  # it reads no later one


def steps(config: Config) -> Iterator[Step]:
    fork = multiprocessing.get_context("fork")  # no thread runs here
    queue: Queue[Game | None] = fork.Queue(QUEUED_GAMES)
    workers, readers = [], []
    for _ in range(config.workers):
        reader, writer = fork.Pipe(duplex=False)
        workers.append(fork.Process(target=_work, args=(queue, writer), daemon=True))
        workers[-1].start()
        writer.close()  # before the next worker is forked: a pipe ends when nobody holds its writing end any more
        readers.append(reader)
    games = [game for tar in config.shards for game in games_of(tar)]
    naming = (games, config.epochs, config.workers, queue)
    workers.append(fork.Process(target=_name_games, args=naming, daemon=True))
    workers[-1].start()
    records = _shuffle(_receive(list(readers)), (config.window_records or BUFFER_RECORDS) if config.shuffle else 1)
    converted = map(_convert, records)
    try:
        while batch := list(itertools.islice(converted, config.batch_size)):
            yield Step(len(batch), _batch(batch))
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for reader in readers:
            reader.close()
