"""The chess example's training: killed and run again, and followed by the validation in another process."""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "chess"
# 200 positions a shard: 40 steps an epoch.
SHARDS = [
    "--positions",
    "1000",
    "--shards",
    "4",
    "--validation-shards",
    "1",
    "--stockfish",
    "off",
    "--processes",
    "2",
]
TRAINING = ["--epochs", "2", "--batch-size", "20", "--save-every", "10", "--device", "cpu"]
VALIDATION = ["--batch-size", "80"]
FIRST_EPOCH, LAST = 40, 80


class Script:
    """A script of the example in a process of its own; killed if the test gives up before it has ended."""

    def __init__(self, forks: Any, output: Path, name: str, *args: Any) -> None:
        import scripts

        self._output = output
        self._process = forks.Process(target=scripts.run, args=(EXAMPLE / name, [*map(str, args)], output))

    def __enter__(self) -> Script:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def press_control_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)  # loaderd's processes get it too

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not reached():
            assert self._process.is_alive() and time.monotonic() < deadline_s, self._output.read_text()
            time.sleep(0.005)

    def end(self) -> str:
        """What it printed, once it has ended well."""
        self._process.join(60)
        printed = self._output.read_text()
        assert self._process.exitcode == 0, printed
        assert "Traceback" not in printed and "UserWarning" not in printed, printed
        return printed


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Script]]:
    """Starts a script in a process in which TensorFlow has been imported, but not used: that saves seconds."""
    context = multiprocessing.get_context("forkserver")
    outputs = tmp_path_factory.mktemp("outputs")
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        context.set_forkserver_preload(["keras", "loaderd_tf"])
        yield lambda name, *args: Script(context, outputs / str(next(numbers)), name, *args)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}.weights.h5"


def weights(run: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint holds, the optimizer's state too, by name."""
    found: dict[str, Any] = {}
    with h5py.File(checkpoint(run, step)) as file:
        file.visititems(lambda name, item: found.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def shards(start: Callable[..., Script], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with start("make_shards.py", "--out", folder, *SHARDS) as making:
        making.end()
    return folder


@pytest.fixture(scope="module")
def followed(start: Callable[..., Script], shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing interrupted, with a validation beside it from before its start."""
    run = tmp_path_factory.mktemp("followed") / "run"
    with start("validate.py", "--data", shards, "--run", run, *VALIDATION) as validation:
        with start("train.py", "--data", shards, "--out", run, *TRAINING) as training:
            training.end()
        assert "train.py has ended" in validation.end()
    return run


def test_validation_follows_the_checkpoints_of_a_training(
    start: Callable[..., Script], shards: Path, followed: Path
) -> None:
    validated = rows(followed / "validation.csv")
    steps = [int(row["step"]) for row in validated]
    assert steps == sorted(set(steps)) and set(steps) <= set(range(10, LAST + 1, 10))
    assert steps[-1] == LAST
    reported = float(rows(followed / "history.csv")[-1]["val_loss"])
    assert float(validated[-1]["val_loss"]) == pytest.approx(reported, rel=1e-5)
    with start("validate.py", "--data", shards, "--run", followed, *VALIDATION) as again:
        again.end()
    assert rows(followed / "validation.csv") == validated, "nothing was left to validate"


def test_a_killed_training_goes_on_with_the_next_batch(
    start: Callable[..., Script], followed: Path, shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with start("train.py", "--data", shards, "--out", run, *TRAINING) as first:
        first.wait_until(checkpoint(run, FIRST_EPOCH + 10).exists)
        first.kill()
    assert not checkpoint(run, LAST).exists(), "it was killed in the middle of the second epoch"
    saved_ns = checkpoint(run, FIRST_EPOCH).stat().st_mtime_ns

    with start("train.py", "--data", shards, "--out", run, *TRAINING) as second:
        assert "going on from" in second.end()
    assert checkpoint(run, FIRST_EPOCH).stat().st_mtime_ns == saved_ns, "the first epoch was not trained again"
    assert rows(run / "history.csv") == rows(followed / "history.csv")
    expected, found = weights(followed, LAST), weights(run, LAST)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert not (run / "backup").exists(), "a training that has ended is begun anew"


def test_validation_takes_the_newest_once_and_stops_with_control_c(
    start: Callable[..., Script], followed: Path, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (FIRST_EPOCH - 10, FIRST_EPOCH):
        shutil.copy(checkpoint(followed, step), checkpoint(tmp_path, step))
    (tmp_path / "checkpoints" / "unfinished.weights.h5").write_bytes(b"half of it")
    results = tmp_path / "validation.csv"
    results.write_text("step,val_loss\n10,0.5\n")  # of one that was stopped before
    with start("validate.py", "--data", shards, "--run", tmp_path, *VALIDATION) as validation:
        validation.wait_until(lambda: len(rows(results)) > 1)
        validation.press_control_c()
        assert validation.end().endswith("\nstopped\n")
    old, new = rows(results)
    assert old == {"step": "10", "val_loss": "0.5"} and new["step"] == str(FIRST_EPOCH)
    reported = float(rows(followed / "history.csv")[0]["val_loss"])
    assert float(new["val_loss"]) == pytest.approx(reported, rel=1e-5)
