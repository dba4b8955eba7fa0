"""Trainings that are killed at arbitrary moments, and go on as if nothing had been."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.numbered import Numbered


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes in which TensorFlow has been imported, but not used, in a quarter of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bindings.training"])
    return context


class Training:
    """A training of training.py in a folder of its own, and what its log says."""

    def __init__(self, forks: Any, folder: Path, name: str, shards: list[str]) -> None:
        folder.mkdir()
        self._forks, self._folder, self._name, self._shards = forks, folder, name, shards

    def start(self) -> Any:
        from tests.bindings import training

        process = self._forks.Process(target=getattr(training, self._name), args=(self._shards, self._folder))
        process.start()
        return process

    def _lines(self) -> list[str]:
        log = self._folder / "log"
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def run_and_kill(self, step: int, saving: bool) -> None:
        """Until it has done ``step`` or more; ``saving``: until a checkpoint is then being written.

        That one may not be seen in time: then until it has done some more.
        """
        process = self.start()
        deadline_s = time.monotonic() + 200
        while True:
            assert process.is_alive() and time.monotonic() < deadline_s
            last = (self._lines() or ["start"])[-1]
            done = 0 if last == "start" else int(last.split(" ")[0])
            writing = any("temp" in path.name or "tmp" in path.name for path in self._folder.glob("*/*"))
            if done >= step and (writing or not saving or done >= step + 10):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def result_of(self, process: Any) -> dict[str, Any]:
        """What it wrote, once it has come to its end."""
        process.join(90)
        assert process.exitcode == 0
        result: dict[str, Any] = json.loads((self._folder / "result.json").read_text())
        return result

    def batches(self) -> tuple[list[str], list[int]]:
        """The ids of each step, and the first step after each start.

        A step must have the same ids whenever it was done, and none be left out.
        """
        found: dict[int, str] = {}
        starts: list[int] = []
        lines = self._lines()
        for before, line in itertools.pairwise(lines):
            if line == "start":
                continue
            step, ids = line.split(" ", 1)
            if before == "start":
                starts.append(int(step))
            assert found.setdefault(int(step), ids) == ids
        assert list(found) == list(range(1, len(found) + 1))
        return list(found.values()), starts


@pytest.mark.slow  # of the example, a training that is killed goes on in `make test`
@pytest.mark.timeout(240)  # four processes that build and compile a model, most of them in turn
@pytest.mark.parametrize("name", ["train_in_a_loop", "train_by_fit"])
def test_a_training_that_is_killed(forks: Any, numbered: Numbered, tmp_path: Path, name: str):
    """It goes on in the middle of its epochs of 22 steps, and comes to the same batches, weights and logs."""
    shards = [str(path) for path in numbered.write([150, 180, 100])]
    whole, killed = (Training(forks, tmp_path / each, name, shards) for each in ("whole", "killed"))
    unkilled = whole.start()
    killed.run_and_kill(13, saving=True)
    killed.run_and_kill(50, saving=False)
    assert killed.result_of(killed.start()) == whole.result_of(unkilled)
    batches, starts = killed.batches()
    assert (batches, [1]) == whole.batches()
    assert len(batches) == 66 and starts[0] == 1 < 11 <= starts[1] < 45 < starts[2]
