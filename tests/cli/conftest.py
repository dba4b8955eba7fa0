"""Trainings for those who watch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_training(write_numbered: Callable[[Sequence[int]], list[Path]], tmp_path: Path) -> Iterator[Start]:
    """Starts a training, whose steps and batches take so many seconds each."""
    write_numbered([3000, 3000])
    running = []

    def start(step_s: float, batch_s: float = 0.0) -> subprocess.Popen[str]:
        program = str(Path(__file__).with_name("watched_training.py"))
        command = [sys.executable, program, f"{tmp_path}/shards/*.tfrecord", str(step_s), str(batch_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0, "to be watched has done it no harm"
