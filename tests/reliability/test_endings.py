"""The run of all endings; its programs are those of ``tests/endings``. See ``endings.py``."""

from __future__ import annotations

import subprocess
import sys

from tests.reliability import endings


def test_a_pattern_of_no_program_is_an_error():
    command = [sys.executable, "-m", endings.__name__, "--only", "no such end", "--times", "1", "--busy", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and '"programs": 0' in done.stdout
