"""The kill test, briefly: see ``torture.py`` for the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability import torture


@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_whatever_is_killed_each_record_comes_once_and_in_order(tmp_path: Path):
    """In a process of its own: it looks at what that has open."""
    command = [sys.executable, "-m", torture.__name__, "--signals", "20"]
    output = tmp_path / "figures"  # a pipe would stay open as long as a process that was left
    with output.open("w") as file:
        done = subprocess.run(command, stdout=file, check=False)
    figures = json.loads(output.read_text())
    assert done.returncode == 0, figures
    assert sum(figures["signals"].values()) >= 20 and figures["epochs"] and figures["workers_restarted"]
