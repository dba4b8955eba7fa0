"""Ray Train: ranks get their shares, and a training goes on in the middle of an epoch with another number of them."""

from __future__ import annotations

import json

import pytest

from tests.bindings_ray.ray_cluster import expected

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")
pytest.importorskip("tensorboardX", reason="Ray Train is not installed: make test-ray installs it")

import loaderd_ray

STEPS = 5


def train(settings):
    """Each rank notes what it got; ``steps``: after how many it ends, with a checkpoint of rank 0's; None: never."""
    import os
    import tempfile

    import ray.train
    import tensorflow as tf
    import tf_keras

    assert os.environ["TF_USE_LEGACY_KERAS"] == "1"
    model = tf_keras.Sequential([tf_keras.Input((32,)), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rank = ray.train.get_context().get_world_rank()
    start = loaderd_ray.load(settings["checkpoint"] or ray.train.get_checkpoint())
    found = []
    with loaderd_ray.connect("trained", batch_size=64, workers=1, start=start, sharing=settings["sharing"]) as loader:
        for batch in loader:
            model.train_on_batch(tf.constant(batch["bits"]), tf.zeros(len(batch["id"])))
            found.append(batch["id"].tolist())
            if len(found) == settings["steps"]:
                break
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                loaderd_ray.save(loader, folder)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            with open(f"{settings['out']}-{rank}.json", "w") as out:
                json.dump(found, out)
            ray.train.report({"batches": len(found)}, checkpoint=checkpoint)


def run(tmp_path, ranks, steps, checkpoint=None, sharing=None):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    settings = {"out": str(tmp_path / f"of-{ranks}"), "steps": steps, "checkpoint": checkpoint, "sharing": sharing}
    result = TensorflowTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path / "storage"), name=f"of-{ranks}-{sharing}"),
    ).fit()
    return result, [json.loads((tmp_path / f"of-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(start_cluster, datasets, tmp_path):
    start_cluster(2, 2)
    loaderd_ray.serve("ray_datasets:train", name="trained", cpus=1)
    result, before = run(tmp_path, 2, STEPS)
    assert before == [expected(datasets, (rank, 2))[:STEPS] for rank in range(2)]
    assert loaderd_ray.load(result.checkpoint).batch == STEPS
    with result.checkpoint.as_directory() as folder:
        _, after = run(tmp_path, 3, None, folder)
    assert len({len(batches) for batches in after}) == 1
    ids = [number for batches in before + after for batch in batches for number in batch]
    assert sorted(ids) == list(range(1000))
    _, whole = run(tmp_path, 2, None, sharing="independent")
    assert whole == [expected(datasets)] * 2, "each has all of it"
    loaderd_ray.stop("trained")
