"""No CRC check: one pipe message a record and a shuffle buffer in the parent, as Leela Chess Zero's training has it.

::

    worker: file ──► record ──send_bytes──┐
    worker: file ──► record ──send_bytes──┴─► parent: shuffle buffer, one in, one out ──► batch ──► unpacked in numpy

After ``chunkparser.py`` of LeelaChessZero/lczero-training, whose records have a fixed size; so have the rows here.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
from candidates._records import ROW, paths, read_rows, unpack, workers_of
from harness.interface import Config, Step, only_chess

NOTE = "no CRC check"

BUFFER_RECORDS = 100_000

cannot = only_chess


def _work(config: Config, worker: int, writer: Connection) -> None:
    for path in paths(config, worker, workers_of(config)):
        for row in read_rows(path, config.compression):
            writer.send_bytes(row)
    writer.close()


def _receive(readers: list[Connection]) -> Iterator[bytes]:
    """A record of each worker in turn, until all have ended."""
    while readers:
        for reader in list(readers):
            try:
                yield reader.recv_bytes()
            except EOFError:
                readers.remove(reader)


def _shuffle(records: Iterator[bytes], buffer_records: int) -> Iterator[bytes]:
    """Each record takes the place of a random one of the buffer, which goes on instead."""
    buffer = list(itertools.islice(records, buffer_records))
    for record in records:
        place = int(random.random() * buffer_records)
        yield buffer[place]
        buffer[place] = record
    random.shuffle(buffer)
    yield from buffer


def steps(config: Config) -> Iterator[Step]:
    fork = multiprocessing.get_context("fork")  # no thread runs here
    workers, readers = [], []
    for number in range(workers_of(config)):
        reader, writer = fork.Pipe(duplex=False)
        workers.append(fork.Process(target=_work, args=(config, number, writer), daemon=True))
        workers[-1].start()
        writer.close()  # before the next worker is forked: a pipe ends when nobody holds its writing end any more
        readers.append(reader)
    records = _receive(list(readers))
    if config.shuffle:
        records = _shuffle(records, config.window_records or BUFFER_RECORDS)
    try:
        while batch := list(itertools.islice(records, config.batch_size)):
            yield Step(len(batch), unpack(np.frombuffer(b"".join(batch), ROW), config.dtype))
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for reader in readers:
            reader.close()
