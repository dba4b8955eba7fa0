"""No CRC check, files' order: SPDL, a file at a time, unpacked by a pool of threads, all in numpy.

::

    source: path ──read, parse──► a file's rows ──cut──► a batch's rows ──unpack, in the pool──► fields
                                                                        └◄── boards that were used

The source has a thread of its own. Boards are used again: fresh memory for each batch costs as much as unpacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from candidates._records import ROW, Rows, cut, paths, read_rows, unpack
from harness.interface import Config, Step, only_chess
from spdl.pipeline import PipelineBuilder
from spdl.pipeline.defs import Aggregator

NOTE = "no CRC check, files' order"

cannot = only_chess


class Cut(Aggregator):
    """Rows of any number in, lists of batches' rows out; what is left of a file is completed from the next."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.left: Rows = np.empty(0, ROW)

    def accumulate(self, item: Rows) -> list[Rows]:
        whole, self.left = cut(np.concatenate([self.left, item]), self.batch_size)
        return whole

    def flush(self) -> list[Rows] | None:
        return [self.left] if len(self.left) else None


def run(files: Iterable[Rows], aggregator: Cut, config: Config) -> Iterator[Step]:
    used: list[Any] = []  # boards; a list's append and pop are atomic

    def unpack_batch(rows: Rows) -> dict[str, Any]:
        try:
            board = used.pop()[: len(rows)]
        except IndexError:
            board = None
        return unpack(rows, config.dtype, board)

    pipeline = (
        PipelineBuilder()
        .add_source(files)
        .aggregate(aggregator)
        .disaggregate()
        .pipe(unpack_batch, concurrency=config.workers)
        .add_sink(buffer_size=2)
        .build(num_threads=config.workers, use_thread_output_queue=True)
    )
    with pipeline.auto_stop():
        for batch in pipeline:
            yield Step(len(batch["score"]), batch)
            if len(batch["score"]) == config.batch_size:
                used.append(batch["board"])


def steps(config: Config) -> Iterator[Step]:
    files = (read_rows(path, config.compression) for path in paths(config))
    return run(files, Cut(config.batch_size), config)
