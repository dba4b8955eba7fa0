"""What it costs to be watched: where the training or the measurement fails, the script ends, and leaves nothing."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import watching


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_training_that_dies_at_once_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_TRAINING", "raise SystemExit(3)")
    options = argparse.Namespace(every=1, rounds=1, seconds=0.1)
    with pytest.raises(SystemExit, match="the training ended with status 3"):
        watching.measure(str(tmp_path), str(tmp_path), "bare", options)


def test_top_and_its_terminal_are_gone_when_a_measurement_fails() -> None:
    before = open_files()
    with pytest.raises(ZeroDivisionError), watching.top() as (process, _):
        1 / 0  # noqa: B018
    assert not Path(f"/proc/{process}").exists() and open_files() == before


def test_a_top_that_shows_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_COMMAND", "raise SystemExit(3)")
    with pytest.raises(OSError), watching.top():
        pass
