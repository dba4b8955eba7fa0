"""A trainer or a validator, as its user would write it. Arguments: the folder, its name, and how it shares.

``trainer.py FOLDER NAME RANK SIZE`` trains on its part of "train" for three epochs, with a checkpoint of everything
every ten steps; run again after a crash, it goes on. ``trainer.py FOLDER NAME`` validates on "valid", again and
again, until there is a file ``stop``. Both write a line for each batch to NAME.jsonl.
"""

import json
import os
import sys
import time
from pathlib import Path

import loaderd

EPOCHS = 3


def log(name: str, **values: object) -> None:
    with open(f"{name}.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")


def train(name: str, rank: int, size: int) -> None:
    import keras
    import loaderd_tf
    import tensorflow as tf

    keras.utils.set_random_seed(rank)
    net = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    step = tf.Variable(0, dtype=tf.int64)
    loader = loaderd.connect(
        "unix:x.sock", dataset="train", batch_size=10, epochs=EPOCHS, sharing="split", shard=(rank, size), name=name
    )
    iterator = iter(loaderd_tf.from_loader(loader))
    checkpoint = tf.train.Checkpoint(model=net, optimizer=net.optimizer, iterator=iterator, step=step)
    manager = tf.train.CheckpointManager(checkpoint, name, max_to_keep=1)
    manager.restore_or_initialize()
    for batch in iterator:
        net.train_on_batch(batch["bits"], tf.cast(batch["id"], tf.float32) / 1000)
        log(name, step=int(step), ids=batch["id"].numpy().tolist())
        step.assign_add(1)
        time.sleep(0.01)
        if int(step) % 10 == 0:
            manager.save()
    log(name, weights=float(sum(tf.reduce_sum(weight) for weight in net.get_weights())))


def validate(name: str) -> None:
    while not os.path.exists("stop"):
        try:
            loader = loaderd.connect("unix:x.sock", dataset="valid", batch_size=50, name=name)
        except loaderd.errors.ServerError:  # the server is away
            time.sleep(0.1)
            continue
        with loader:
            ids = [int(number) for batch in loader for number in batch["id"]]
        log(name, ids=ids)
    log(name, ended=True)


if __name__ == "__main__":
    folder, name, *shard = sys.argv[1:]
    os.chdir(Path(folder))
    if shard:
        train(name, int(shard[0]), int(shard[1]))
    else:
        validate(name)
