"""tf.data service: tf.data's pipeline in two worker servers, files dealt out to them as they ask (DYNAMIC).

The servers are a deployment of their own that serves many trainings, and are started and ended apart from the
training. Run as a program, this module is one of them: ``python -m trainers.tfdata_service_epoch dispatcher FILE``
writes its address to a file once it serves, ``… worker ADDRESS FILE`` an empty file. A worker server that died is not
started again, as an orchestrator would do: what happens until then is what is looked at.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf
from tensorflow.data.experimental import service

from trainers import Task, _tf


class Epoch(_tf.Epoch):
    def __init__(self, task: Task, saved: Path | None) -> None:
        distribute = service.distribute(service.ShardingPolicy.DYNAMIC, f"grpc://{task.service}")
        super().__init__(_tf.batches(task, cycle_length=1).apply(distribute).prefetch(tf.data.AUTOTUNE), saved)


def main() -> None:
    kind, *arguments, ready = sys.argv[1:]
    if kind == "worker":
        server = service.WorkerServer(service.WorkerConfig(dispatcher_address=arguments[0]))
        text = ""
    else:
        server = service.DispatchServer()
        text = server.target.removeprefix("grpc://")
    unfinished = Path(ready + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(ready)
    server.join()


if __name__ == "__main__":
    main()
