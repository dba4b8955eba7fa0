"""The command runs as a user runs it, in their folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_BRIEF = ("--seconds", "0.2", "--warmup-seconds", "0", "--attempts", "1", "--batch-size", "128", "--name", "x")


@pytest.fixture
def loaderd_bench(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``loaderd bench`` in ``tmp_path``, briefly."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("loaderd")), "bench", *arguments, *_BRIEF]
        command += ["--work-dir", str(tmp_path / "work")]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)

    return run
