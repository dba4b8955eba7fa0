"""The command ``loaderd`` as its users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("loaderd"))


def run(*arguments: Any, folder: Path | None = None, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``loaderd …`` in a folder, ours if None, with an empty standard input. Raises TimeoutExpired at the limit."""
    command = [COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
    )
