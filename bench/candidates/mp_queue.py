"""No CRC check, files' order: two processes put whole batches on a queue, a generator hands them to tf.data.

As most people write it who find tf.data too slow at unpacking. Each batch is pickled, sent through a pipe, unpickled,
and copied once more by ``from_generator``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import Any

import tensorflow as tf
from candidates._records import batches, unpack, workers_of
from candidates._tfdata import consume
from harness.interface import Config, Step, only_chess

NOTE = "no CRC check, files' order"

QUEUED_BATCHES = 16

cannot = only_chess


def _work(config: Config, worker: int, queue: Queue[Any]) -> None:
    for rows in batches(config, worker, workers_of(config)):
        queue.put(unpack(rows, config.dtype))
    queue.put(None)


def steps(config: Config) -> Iterator[Step]:
    fork = multiprocessing.get_context("fork")  # "spawn" would import TensorFlow in each worker; no thread runs yet
    queue = fork.Queue(QUEUED_BATCHES)
    workers = [fork.Process(target=_work, args=(config, n, queue), daemon=True) for n in range(workers_of(config))]
    for worker in workers:
        worker.start()

    def generate() -> Iterator[Any]:
        running = len(workers)
        while running:
            batch = queue.get()
            if batch is None:
                running -= 1
            else:
                yield batch

    signature = {
        name: tf.TensorSpec([None, *spec.shape], spec.dtype) for name, spec in config.delivered().specs.items()
    }
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature).prefetch(tf.data.AUTOTUNE)
    try:
        yield from consume(dataset, config)
    finally:  # the generator has been closed by now
        for worker in workers:
            worker.kill()
            worker.join()
