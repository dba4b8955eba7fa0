"""The leak test, briefly: see ``leaks.py`` for the long one."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.reliability import leaks
from tests.reliability.leaks import ENDS, PHASES, Figures, Training, kill, let_end, look_for_leaks


@pytest.mark.slow  # tests/endings looks at what each end leaves; at SIGKILL, tests/daemon/test_training_process.py
@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_nothing_is_left_of_a_training_however_it_ends(tmp_path: Path):
    figures = look_for_leaks(tmp_path, len(PHASES), len(ENDS), seed=0, tensorflow_share=0.0)
    assert figures.most_processes >= 2
    assert figures.is_clean, figures


@pytest.mark.parametrize(
    ("end", "wrong"),
    [
        ("SIGKILL", ["it ended before 'epoch'", "status 1, not -9, after SIGKILL epoch"]),
        ("sys.exit", ["status 1, not 4, after sys.exit"]),
    ],
)
def test_a_training_that_opens_no_loader_is_wrong(tmp_path: Path, end: str, wrong: list[str]):
    figures = Figures()
    training = Training(tmp_path, [str(tmp_path / "missing")], end, False, "none")
    try:
        if end == "SIGKILL":
            kill(training, figures, "epoch", 0.0)
        else:
            let_end(training, figures, end, random.Random(0))
    finally:
        training.close(figures)
    assert not figures.is_clean
    assert figures.wrong == wrong and "Traceback" in figures.printed[0]


@pytest.mark.parametrize(
    ("end", "most_processes", "status"), [("SIGKILL epoch", 1, 1), ("SIGKILL epoch", 3, 0), ("Ctrl-C", 0, 0)]
)
def test_the_status_tells_whether_any_loader_that_was_killed_had_processes(
    monkeypatch: pytest.MonkeyPatch, end: str, most_processes: int, status: int
):
    found = Figures(Counter([end]), most_processes=most_processes)
    monkeypatch.setattr(leaks, "look_for_leaks", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["leaks.py"])
    assert leaks.main() == status
