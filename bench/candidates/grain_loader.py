"""No CRC check, files' order: Grain reads TFRecords, two processes batch and unpack.

Grain's reader yields one record at a time; everything behind it is done for a batch at a time. But a filter is asked
of each record, of which it needs the score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from candidates._records import ROW, parse, row_of, unpack
from grain.experimental import InterleaveIterDataset, TFRecordIterDataset
from harness.interface import Config, Step, only_chess

NOTE = "no CRC check, files' order"


def cannot(config: Config) -> str | None:
    return "its reader takes no compressed files" if config.compression else only_chess(config)


flags.FLAGS.mark_as_parsed()  # Grain reads its own, which only a program of absl's would parse


def _join(records: Sequence[bytes]) -> tuple[bytes, Any]:
    return b"".join(records), np.fromiter(map(len, records), np.int64, len(records))


def _stack(records: Sequence[tuple[bytes, int]]) -> Any:
    rows = np.empty(len(records), ROW)
    rows["d"] = np.frombuffer(b"".join(board for board, _ in records), np.uint8).reshape(len(rows), -1)
    rows["s"] = [score for _, score in records]
    return rows


def steps(config: Config) -> Iterator[Step]:
    def decode(joined: tuple[bytes, Any]) -> dict[str, Any]:
        data, lengths = joined
        return unpack(parse(data, np.cumsum(lengths) - lengths, lengths), config.dtype)

    files = grain.MapDataset.source(config.shards).repeat(config.epochs).map(TFRecordIterDataset)
    one_in, records = config.one_in, InterleaveIterDataset(files, cycle_length=1)
    if one_in is None:
        batches = records.batch(config.batch_size, batch_fn=_join).map(decode)
    else:
        passing = records.map(row_of).filter(lambda row: row[1] % one_in == 0)
        batches = passing.batch(config.batch_size, batch_fn=_stack).map(lambda rows: unpack(rows, config.dtype))
    options = grain.MultiprocessingOptions(num_workers=config.workers, per_worker_buffer_size=2)
    iterator = iter(batches.mp_prefetch(options))
    try:
        for batch in iterator:
            yield Step(len(batch["score"]), batch)
    finally:
        iterator.close()
