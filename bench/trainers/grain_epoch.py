"""Grain: its TFRecord reader (which checks no CRC), files in a seeded order, batches made in two worker processes.

The examples are parsed with the protobuf of the package tfrecord. Grain has no option to skip damage. Resumes with
the iterator's ``get_state`` and ``set_state``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grain
from absl import flags
from grain.experimental import InterleaveIterDataset, TFRecordIterDataset
from tfrecord import example_pb2

from trainers import WORKERS, Batch, Task, stack

flags.FLAGS.mark_as_parsed()  # Grain reads its own, which only a program of absl's would parse


def parse(serialized: bytes) -> dict[str, Any]:
    features = example_pb2.Example.FromString(serialized).features.feature
    return {"d": features["d"].bytes_list.value[0], "s": features["s"].int64_list.value}


class Epoch:
    def __init__(self, task: Task, saved: Path | None) -> None:
        files = grain.MapDataset.source(task.shards).seed(0).shuffle().map(TFRecordIterDataset)
        dataset = (
            InterleaveIterDataset(files, cycle_length=2)
            .map(parse)
            .batch(task.batch_size, batch_fn=stack)
            .mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=2))
        )
        self._iterator = iter(dataset)
        if saved:
            self._iterator.set_state(json.loads(saved.read_text()))

    def __next__(self) -> Batch:
        batch: Batch = next(self._iterator)
        return batch

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self._iterator.get_state()))

    def close(self) -> str:
        self._iterator.close()
        return ""
