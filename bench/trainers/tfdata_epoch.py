"""tf.data in the training process: interleaved files, a shuffle buffer, parsed in batches, prefetched; all seeded.

Its threads are its workers. Skips with ``ignore_errors``, which its documentation names for damaged files.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from trainers import Task, _tf


class Epoch(_tf.Epoch):
    def __init__(self, task: Task, saved: Path | None) -> None:
        super().__init__(_tf.batches(task, cycle_length=4).prefetch(tf.data.AUTOTUNE), saved)
