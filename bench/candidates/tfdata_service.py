"""tf.data service: the expert's pipeline in worker processes on this machine, files dealt out to them as they ask.

::

    dispatcher, in this process ──next file──► worker process: read, shuffle, batch, decode ──gRPC──► this process

Batches are sent as they are: compressing them, the default, costs more than it saves on one machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import tensorflow as tf
from candidates._tfdata import READ_BYTES, SHUFFLE_RECORDS, Tensors, consume, parser
from candidates.tfdata_expert import decode, expansion_of
from harness.interface import Config, Step, only_chess
from tensorflow.data.experimental import service

NOTE = ""

cannot = only_chess


def _dataset(config: Config) -> tf.data.Dataset:
    parse, expansion = parser(config.delivered()), expansion_of(config.dtype)

    def parse_and_decode(serialized: tf.Tensor) -> Tensors:
        return decode(parse(serialized), expansion)

    files = tf.data.Dataset.from_tensor_slices(list(config.shards))
    if config.shuffle:
        files = files.shuffle(len(config.shards))
    records = files.repeat(config.epochs).flat_map(
        lambda file: tf.data.TFRecordDataset(file, config.compression, READ_BYTES)
    )
    if config.shuffle:
        records = records.shuffle(SHUFFLE_RECORDS)
    return records.batch(config.batch_size).map(parse_and_decode, tf.data.AUTOTUNE, deterministic=False)


def steps(config: Config) -> Iterator[Step]:
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    workers = [
        subprocess.Popen([sys.executable, "-m", "candidates.tfdata_service", address]) for _ in range(config.workers)
    ]
    try:
        distributed = _dataset(config).apply(
            service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target, compression=None)
        )
        yield from consume(distributed.prefetch(tf.data.AUTOTUNE), config)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> None:
    """A worker process; the dispatcher's address is its argument. It runs until it is ended."""
    service.WorkerServer(service.WorkerConfig(dispatcher_address=sys.argv[1])).join()


if __name__ == "__main__":
    main()
