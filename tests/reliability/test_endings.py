"""How the run of all endings ends itself; its programs are those of ``tests/endings``. See ``endings.py``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.endings.ending import Case, Result, every_use_and_end
from tests.reliability import endings

CASES = list(every_use_and_end())[:50]


class Runner:
    """In place of the one that runs programs: it calls ``act``."""

    act: Callable[[Case], None]
    present: set[Runner]
    ran: list[Case]

    def __init__(self, folder: Path, source: str) -> None:
        self.present.add(self)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.present.remove(self)

    def run(self, case: Case, limit_s: float) -> Result:
        self.ran.append(case)
        Runner.act(case)
        return Result(case, 0.0, ())


def run_all(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[Case], None]) -> list[Result]:
    monkeypatch.setattr(endings, "Runner", Runner)
    Runner.act, Runner.present, Runner.ran = staticmethod(act), set(), []
    return endings.run_all(CASES, folder, "loader", 1.0, 2, verbose=False)


def test_each_case_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = run_all(monkeypatch, tmp_path, lambda case: None)
    assert sorted(result.case.name for result in results) == sorted(case.name for case in CASES)


def test_an_error_of_a_runner_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(case: Case) -> None:
        raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        run_all(monkeypatch, tmp_path, fail)


def test_ctrl_c_waits_for_what_runs_and_begins_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Behind it the folder goes in which programs run."""
    begun, ends = threading.Event(), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments: Any, **options: Any) -> None:
            ends.set()
            super().shutdown(*arguments, **options)

    def act(case: Case) -> None:
        begun.set()
        assert ends.wait(60)

    def interrupted(futures: object) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(endings, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(endings, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(monkeypatch, tmp_path, act)
    assert not Runner.present
    assert len(Runner.ran) <= 2


def test_a_pattern_of_no_program_is_an_error():
    command = [sys.executable, "-m", endings.__name__, "--only", "no such end", "--times", "1", "--busy", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and '"programs": 0' in done.stdout
