"""The script that needs a GPU, where there is none: it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_copies
import pytest


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, gpu_copies.__file__, "--ways", "tf_data", "--records", "2000"]
    command += ["--work-dir", str(tmp_path), "--results-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "TensorFlow finds no GPU" in done.stderr
    assert not list(tmp_path.glob("*.md"))
