"""Trains a network on two workers of Ray Train, fed by a server on each node of the cluster.

    python examples/ray/train.py --out demo/ray

It uses the cluster of ``RAY_ADDRESS``; if that is not set, Ray starts one on this machine. ``datasets.py`` says which
shards it reads; ``make demo-chess`` writes them.

If it is killed, the same command goes on from its last checkpoint with exactly the next batch, even with another
number of ``--workers``. A checkpoint holds the weights and the position; the optimizer begins anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import loaderd_ray
import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

NAME = "chess"
STRUCTURE = (("board", "flags"), "score")
REPORT_EVERY = 10
MODEL = "model.weights.h5"


def train(settings: dict[str, Any]) -> None:
    """Runs in each worker of Ray Train.

    Each worker takes its share of an epoch's records, and all take the same number of steps.
    """
    import loaderd_tf
    import tensorflow as tf
    import tf_keras as keras  # TensorflowTrainer has TensorFlow use this Keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        board, flags = keras.Input((8, 8, 24)), keras.Input((10,))
        x = keras.layers.Concatenate()([keras.layers.Flatten()(board), flags])
        x = keras.layers.Dense(64, activation="relu")(x)
        model = keras.Model([board, flags], keras.layers.Dense(1, activation="tanh")(x))
        optimizer = keras.optimizers.Adam(1e-3)

    checkpoint = settings["resume_from"] or ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            model.load_weights(os.path.join(folder, MODEL))

    def learn(board: Any, flags: Any, score: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.square(model([board, flags], training=True)[:, 0] - score)
            loss = tf.nn.compute_average_loss(errors)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function(autograph=False)
    def step(board: Any, flags: Any, score: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(learn, args=(board, flags, score)), axis=None)

    start = loaderd_ray.load(checkpoint)
    if start is not None and start.epoch >= settings["epochs"]:
        return  # it is finished; a loader that starts here would deliver as many epochs again
    number = 0
    with loaderd_ray.connect(
        NAME, batch_size=settings["batch_size"], epochs=settings["epochs"], remainder="drop", workers=1, start=start
    ) as loader:
        for number, ((board, flags), score) in enumerate(loaderd_tf.batches(loader, STRUCTURE), 1):
            loss = step(board, flags, score)
            if number % REPORT_EVERY == 0:
                report(loader, model, float(loss))
        if number % REPORT_EVERY:
            report(loader, model, float(loss))


def report(loader: Any, model: Any, loss: float) -> None:
    """Report the loss and, from rank 0 alone, a checkpoint: weights and position are the same for all workers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            model.save_weights(os.path.join(folder, MODEL))
            loaderd_ray.save(loader, folder)
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder where Ray Train keeps checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    parser.add_argument("--epochs", type=int, default=2, help="how often to train on each record")
    parser.add_argument("--batch-size", type=int, default=256, help="records a step, of each worker")
    args = parser.parse_args()

    # The servers must be able to import ``datasets``. On a cluster, give ray.init runtime_env={"working_dir": …}.
    sys.path.insert(0, str(Path(__file__).parent))
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:  # Ray reserves a core for the server and for each worker: a small machine must claim more than it has
        ray.init("local", num_cpus=max(4, os.cpu_count() or 1))
    loaderd_ray.serve("datasets:train", name=NAME)
    try:
        settings = {"batch_size": args.batch_size, "epochs": args.epochs, "resume_from": newest(args.out)}
        result = TensorflowTrainer(
            train,
            train_loop_config=settings,
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=str(args.out.resolve())),
        ).fit()
        print(f"the last checkpoint: {result.checkpoint.path}" if result.checkpoint else "nothing is left to train")
    finally:
        loaderd_ray.stop(NAME)


def newest(out: Path) -> Checkpoint | None:
    """The newest checkpoint of all runs in this folder."""
    weights = sorted(out.resolve().glob(f"*/checkpoint_*/{MODEL}"), key=os.path.getmtime)
    return Checkpoint.from_directory(str(weights[-1].parent)) if weights else None


if __name__ == "__main__":
    main()
