"""The smallest training in each framework: killed and run again, it ends with the weights of an undisturbed one."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd.testing
from tests.helpers.serving import wait_until

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}  # threads that spin hold up a busy machine
MINIMAL = Path(__file__).parents[2] / "examples" / "minimal"


def of_tensorflow(folder: Path) -> list[Any]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder))
    return [reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())]


def of_keras(folder: Path) -> list[Any]:
    import keras

    return list(keras.models.load_model(folder / "net.keras").get_weights())


def of_torch(file: Path) -> list[Any]:
    import torch

    saved = torch.load(file)
    return [saved["loader"]["position"], *(weight.numpy() for weight in saved["net"].values())]


def of_jax(file: Path) -> list[Any]:
    weights, state = pickle.loads(file.read_bytes())
    return [state["position"], *map(np.asarray, weights)]


CASES = {  # the framework: what its run left; the name of that; its first checkpoint; shards of 10,000 records
    "tensorflow": (of_tensorflow, "", "ckpt-1.index", 6),
    "keras": (of_keras, "", "backup/*.index", 6),
    "torch": (of_torch, "checkpoint", "checkpoint", 20),
    "jax": (of_jax, "checkpoint", "checkpoint", 20),
}


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_behind_its_checkpoint(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    contents, file, checkpoint, num_shards = CASES[name]
    rng = np.random.default_rng(0)
    stored = {"d": rng.random((10_000, 1552)) < 0.2, "s": rng.integers(-900, 900, 10_000)}
    (shard,) = loaderd.testing.write_shards(tmp_path / "shards", stored)
    for number in range(1, num_shards):
        shutil.copy(shard, shard.with_stem(f"{number:05}"))

    processes: list[subprocess.Popen[bytes]] = []

    def start(run: str) -> subprocess.Popen[bytes]:
        (tmp_path / run).mkdir(exist_ok=True)
        arguments = (MINIMAL / f"train_{name}.py", tmp_path / "shards/*.tfrecord", tmp_path / run / file)
        processes.append(subprocess.Popen([sys.executable, *map(str, arguments)], env={**os.environ, **QUIET}))
        return processes[-1]

    try:
        undisturbed, victim = start("undisturbed"), start("killed")
        wait_until(lambda: bool(list((tmp_path / "killed").glob(checkpoint))) or victim.poll() is not None, 120)
        victim.kill()
        assert victim.wait() == -signal.SIGKILL, "it ended before its first checkpoint was seen"
        assert start("killed").wait(120) == 0
        assert undisturbed.wait(120) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert digest(contents(tmp_path / "killed" / file)) == digest(contents(tmp_path / "undisturbed" / file))


def digest(values: list[Any]) -> list[str]:
    return [hashlib.sha256(np.asarray(value).tobytes()).hexdigest() for value in values]
