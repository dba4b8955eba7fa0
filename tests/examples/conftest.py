"""Starts scripts of the examples, quickly: TensorFlow is imported once for all of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / name) for name in ("chess", "go", "gpu")]  # as Python does for a script there


class Script:
    """A script of an example in a process of its own; killed if the test gives up before it has ended."""

    def __init__(self, forks: Any, output: Path, name: str, *args: Any) -> None:
        from tests.examples import scripts

        self._output = output
        self._process = forks.Process(target=scripts.run, args=(EXAMPLES / name, [*map(str, args)], output))

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
        deadline_s = time.monotonic() + 120
        while not reached():
            assert self._process.is_alive() and time.monotonic() < deadline_s, self._output.read_text()
            time.sleep(0.005)

    def end(self, status: int = 0) -> str:
        """What it printed, once it has ended."""
        self._process.join(150)
        printed = self._output.read_text()
        assert self._process.exitcode == status, printed
        assert "Traceback" not in printed and "UserWarning" not in printed, printed
        return printed


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Script]:
    """Starts a script in a process in which TensorFlow has been imported, but not used: that saves seconds."""
    context = multiprocessing.get_context("forkserver")
    outputs = tmp_path_factory.mktemp("outputs")
    numbers = itertools.count()
    context.set_forkserver_preload(["keras", "loaderd_tf"])
    return lambda name, *args: Script(context, outputs / str(next(numbers)), name, *args)
