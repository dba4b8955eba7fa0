"""The command runs as a user runs it, in their folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import commands
import pytest

_BRIEF = ("--seconds", "0.2", "--warmup-seconds", "0", "--attempts", "1", "--batch-size", "128", "--name", "x")


@pytest.fixture
def loaderd_bench(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``loaderd bench`` in ``tmp_path``, briefly."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = (*_BRIEF, "--work-dir", tmp_path / "work", *arguments)
        return commands.run("bench", *given, folder=tmp_path, limit_s=100)

    return run
