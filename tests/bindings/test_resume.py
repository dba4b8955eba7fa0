"""Trainings that are killed at arbitrary moments, and go on as if nothing had been."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes in which TensorFlow has been imported, but not used, in a quarter of a second."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        context.set_forkserver_preload(["training"])
        yield context


class Training:
    """A training of training.py in a folder of its own, and what its log says."""

    def __init__(self, forks: Any, folder: Path, name: str, *args: Any) -> None:
        folder.mkdir()
        self._forks, self._folder, self._name, self._args = forks, folder, name, args

    def _start(self) -> Any:
        import training

        process = self._forks.Process(target=getattr(training, self._name), args=(*self._args, self._folder))
        process.start()
        return process

    def _lines(self) -> list[str]:
        log = self._folder / "log"
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def run(self) -> dict[str, Any]:
        """To its end; returns its result."""
        process = self._start()
        process.join(90)
        assert process.exitcode == 0
        result: dict[str, Any] = json.loads((self._folder / "result.json").read_text())
        return result

    def run_and_kill(self, step: int, saving: bool) -> None:
        """Until it has done ``step`` or more; ``saving``: until a checkpoint is then being written.

        That one may not be seen in time: then until it has done some more.
        """
        process = self._start()
        deadline_s = time.monotonic() + 60
        while True:
            assert process.is_alive() and time.monotonic() < deadline_s
            last = (self._lines() or ["start"])[-1]
            done = 0 if last == "start" else int(last.split(" ")[0])
            writing = any("temp" in path.name or "tmp" in path.name for path in self._folder.glob("*/*"))
            if done >= step and (writing or not saving or done >= step + 10):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def batches(self) -> tuple[list[list[int]], list[int]]:
        """The sorted ids of each step, and the first step after each start.

        Each step must have the same ids whenever it was done, and no step be left out.
        """
        found: dict[int, list[int]] = {}
        starts: list[int] = []
        for start in "\n".join(self._lines()).split("start\n")[1:]:
            steps: dict[int, list[int]] = {}
            for line in start.splitlines():
                step, *ids = map(int, line.split())
                steps[step] = sorted(steps.get(step, []) + ids)  # each replica has a line of its own
            starts.append(min(steps))
            for step in sorted(steps)[:-1]:  # perhaps the last was killed between two replicas
                assert found.setdefault(step, steps[step]) == steps[step]
            found.setdefault(max(steps), steps[max(steps)])
        assert sorted(found) == list(range(1, len(found) + 1))
        return [found[step] for step in sorted(found)], starts


def compare_with_killed(forks: Any, folder: Path, name: str, *args: Any, kills: list[tuple[int, bool]]) -> None:
    """Run a training twice, once with kills, and compare all batches and what it comes to.

    The last kill must be in the middle of the last epoch.
    """
    whole, killed = (Training(forks, folder / each, name, *args) for each in ("whole", "killed"))
    expected = whole.run()
    for step, saving in kills:
        killed.run_and_kill(step, saving)
    assert killed.run() == expected
    batches, starts = killed.batches()
    assert (batches, [1]) == whole.batches()
    steps_per_epoch = len(batches) // 3
    assert len(starts) == len(kills) + 1 and starts[-1] > 2 * steps_per_epoch + 1


@pytest.fixture
def shards(write_numbered: Callable[..., list[Path]]) -> list[str]:
    return [str(path) for path in write_numbered([150, 180, 100])]


def test_a_training_loop(forks: Any, shards: list[str], tmp_path: Path):
    kills = [(8, False), (13, True), (57, False)]
    compare_with_killed(forks, tmp_path, "train_in_a_loop", shards, kills=kills)


def test_fit(forks: Any, shards: list[str], tmp_path: Path):
    kills = [(8, False), (13, True), (57, False)]
    compare_with_killed(forks, tmp_path, "train_by_fit", {}, shards, kills=kills)


@pytest.mark.parametrize(
    "options",
    [{"endless": True, "together": 2, "device": "/CPU:1"}, {"mirrored": True}],
    ids=lambda options: "-".join(options),
)
def test_fit_otherwise(forks: Any, shards: list[str], tmp_path: Path, options: dict[str, Any]):
    kills = [(30, False)] if "mirrored" in options else [(57, False)]
    compare_with_killed(forks, tmp_path, "train_by_fit", options, shards, kills=kills)
