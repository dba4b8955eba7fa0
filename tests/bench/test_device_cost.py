"""The script for a machine with a GPU, on a machine that may have none: tiny, and as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import device_cost as device
import pytest
import tensorflow as tf


@pytest.mark.slow
def test_packed_batches_are_smaller_and_train_alike(tmp_path: Path) -> None:
    command = [sys.executable, device.__file__, "--pipelines", "float", "packed_device", "--rounds", "1"]
    command += ["--records", "3000", "--batch-size", "64", "--steps", "4", "--filters", "2", "--workers", "1"]
    command += ["--work-dir", str(tmp_path), "--results-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    floats, packed = map(json.loads, (tmp_path / "device_cost.jsonl").read_text().splitlines())
    assert (floats["pipeline"], packed["pipeline"]) == ("float", "packed_device")
    assert floats["bytes_per_step"] == 64 * 4 * (8 * 8 * 24 + 10 + 1) and packed["bytes_per_step"] == 64 * (194 + 4)
    for run in (floats, packed):
        assert run["step_ms"] > 0 and run["held_step_ms"] > 0
        assert run["waiting_share"] == max(0, 1 - run["held_step_ms"] / run["step_ms"])
    assert packed["first_loss"] == pytest.approx(floats["first_loss"], rel=1e-5)
    page = (tmp_path / "device_cost.md").read_text()
    assert "| packed_device | " in page and "- machine: " in page
    assert ("NO GPU HERE" in page) == ("NO GPU HERE" in done.stdout) == (not tf.config.list_physical_devices("GPU"))
