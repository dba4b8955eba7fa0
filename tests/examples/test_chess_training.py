"""The chess example's training: killed and run again, and followed by the validation in another process."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

Start = Any  # of conftest.py: start("chess/train.py", *arguments)

# 100 positions a shard: 40 steps an epoch.
SHARDS = [
    "--positions",
    "500",
    "--shards",
    "4",
    "--validation-shards",
    "1",
    "--stockfish",
    "off",
    "--processes",
    "2",
]
TRAINING = ["--epochs", "2", "--batch-size", "10", "--save-every", "10", "--device", "cpu"]
VALIDATION = ["--batch-size", "80"]
FIRST_EPOCH, LAST = 40, 80


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
def shards(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with start("chess/make_shards.py", "--out", folder, *SHARDS) as making:
        making.end()
    return folder


@pytest.fixture(scope="module")
def followed(start: Start, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing interrupted, with a validation beside it from before its start."""
    run = tmp_path_factory.mktemp("followed") / "run"
    with start("chess/validate.py", "--data", shards, "--run", run, *VALIDATION) as validation:
        with start("chess/train.py", "--data", shards, "--out", run, *TRAINING) as training:
            training.end()
        assert "train.py has ended" in validation.end()
    return run


@pytest.mark.slow
def test_validation_follows_the_checkpoints_of_a_training(start: Start, shards: Path, followed: Path) -> None:
    validated = rows(followed / "validation.csv")
    steps = [int(row["step"]) for row in validated]
    assert steps == sorted(set(steps)) and set(steps) <= set(range(10, LAST + 1, 10))
    assert steps[-1] == LAST
    reported = float(rows(followed / "history.csv")[-1]["val_loss"])
    assert float(validated[-1]["val_loss"]) == pytest.approx(reported, rel=1e-5)
    with start("chess/validate.py", "--data", shards, "--run", followed, *VALIDATION) as again:
        again.end()
    assert rows(followed / "validation.csv") == validated, "nothing was left to validate"


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_next_batch(
    start: Start, followed: Path, shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with start("chess/train.py", "--data", shards, "--out", run, *TRAINING) as first:
        first.wait_until(checkpoint(run, FIRST_EPOCH + 10).exists)
        first.kill()
    assert not checkpoint(run, LAST).exists(), "it was killed in the middle of the second epoch"
    saved_ns = checkpoint(run, FIRST_EPOCH).stat().st_mtime_ns

    with start("chess/train.py", "--data", shards, "--out", run, *TRAINING) as second:
        assert "going on from" in second.end()
    assert checkpoint(run, FIRST_EPOCH).stat().st_mtime_ns == saved_ns, "the first epoch was not trained again"
    assert rows(run / "history.csv") == rows(followed / "history.csv")
    expected, found = weights(followed, LAST), weights(run, LAST)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert not (run / "backup").exists(), "a training that has ended is begun anew"


def test_validation_takes_the_newest_once_and_stops_with_control_c(
    start: Start, followed: Path, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (FIRST_EPOCH - 10, FIRST_EPOCH):
        shutil.copy(checkpoint(followed, step), checkpoint(tmp_path, step))
    (tmp_path / "checkpoints" / "unfinished.weights.h5").write_bytes(b"half of it")
    results = tmp_path / "validation.csv"
    results.write_text("step,val_loss\n10,0.5\n")  # of one that was stopped before
    with start("chess/validate.py", "--data", shards, "--run", tmp_path, *VALIDATION) as validation:
        validation.wait_until(lambda: len(rows(results)) > 1)
        validation.press_control_c()
        assert validation.end().endswith("\nstopped\n")
    old, new = rows(results)
    assert old == {"step": "10", "val_loss": "0.5"} and new["step"] == str(FIRST_EPOCH)
    reported = float(rows(followed / "history.csv")[0]["val_loss"])
    assert float(new["val_loss"]) == pytest.approx(reported, rel=1e-5)


@pytest.mark.slow
def test_a_training_begins_with_a_trained_net_and_leaves_what_is_frozen(
    start: Start, followed: Path, shards: Path, tmp_path: Path
) -> None:
    short = ["--data", shards, "--batch-size", 50, "--epochs", 1, "--device", "cpu"]
    begin = ["--from", followed / "model.keras"]
    with start("chess/train.py", *short, *begin, "--out", tmp_path, "--freeze", "conv*", "norm*") as training:
        printed = training.end()
    assert "frozen: conv1, norm1, conv2, norm2, conv3, norm3" in printed
    reported = float(rows(followed / "history.csv")[-1]["val_loss"])
    assert f"val_loss {reported:.4f}" in printed, "it begins where the other one ended"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    before, after = weights(followed, LAST), weights(tmp_path, 8)
    changed = {name for name in after if name.startswith("layers/") and (before[name] != after[name]).any()}
    kept = {name for name in after if name.startswith("layers/")} - changed
    assert {name.split("/")[1].split("_")[0] for name in kept} == {"conv2d", "batch"}
    assert {name.split("/")[1].split("_")[0] for name in changed} == {"dense"}


def test_layers_that_do_not_exist_cannot_be_frozen(start: Start, shards: Path, tmp_path: Path) -> None:
    options = ["--batch-size", 100, "--freeze", "bones"]
    with start("chess/train.py", "--data", shards, "--out", tmp_path, *options) as training:
        assert "no layer is called bones; there are conv1, norm1, " in training.end(status=1)
