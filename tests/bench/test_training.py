"""A training is ended with all that it started."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainers import Task, training


def test_a_process_that_ends_meanwhile_keeps_nobody_from_being_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = 2**22 + 1  # Linux gives no process a higher number than 2**22
    monkeypatch.setattr(training, "marked", lambda mark: {gone})
    with training.training("loaderd", Task([], str(tmp_path), batch_size=1, step_s=0.0)) as started:
        assert started.process.poll() is None
    assert started.process.poll() is not None
