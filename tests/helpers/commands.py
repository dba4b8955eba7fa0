"""The command ``loaderd`` as its users run it, in forks of a process that has imported it: that saves 0.3 s each.

How the command starts, and what a signal does to it, is tested with ``COMMAND`` in a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from loaderd.cli.main import COMMANDS
from tests.helpers.zygote import Zygote

COMMAND = str(Path(sys.executable).with_name("loaderd"))


@functools.cache
def _zygote() -> Zygote:
    started = Zygote("loaderd.cli.main", *(f"loaderd.cli.{name}" for name in COMMANDS))
    atexit.register(started.close)
    return started


def run(*arguments: Any, folder: Path | None = None, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``loaderd …`` in a folder, ours if None, with an empty standard input. Raises AssertionError at the limit."""
    words = [str(each) for each in arguments]
    started = _zygote().start(Path(COMMAND), *words, environment=os.environ, folder=folder or Path.cwd())
    ended = started.wait(limit_s)
    assert not ended.hung and not ended.holds_pipes, f"loaderd {' '.join(words)}: {ended}"
    return subprocess.CompletedProcess(["loaderd", *words], ended.status, ended.stdout, ended.stderr)
