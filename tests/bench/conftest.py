"""The script runs as a user runs it, in their folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMPARE = [sys.executable, str(Path(__file__).parents[2] / "bench" / "compare.py")]
_BRIEF = ("--seconds", "0.2", "--warmup-seconds", "0", "--attempts", "1", "--batch-size", "128", "--name", "x")


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``bench/compare.py`` in ``tmp_path``, briefly."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMPARE, *_BRIEF, "--work-dir", str(tmp_path / "work"), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # of candidates that a test writes
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100)

    return run
