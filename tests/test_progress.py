"""When something is said of a long pass, and in which words."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest

from loaderd.progress import ProgressDisplay, ProgressLines
from loaderd.snapshots import Progress

INDEXING = Progress("indexing shards", 1200, 50_000, 10**9, 5 * 10**9)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def run(self, lines: ProgressLines, seconds: int, progress: Progress = INDEXING) -> None:
        """Call ``lines`` every second."""
        for _ in range(seconds):
            lines(progress)
            self.now_s += 1


def test_what_is_quick_says_nothing_and_what_is_long_says_it_seldom(monkeypatch: pytest.MonkeyPatch):
    clock, said = Clock(monkeypatch), list[float]()
    lines = ProgressLines(lambda text: said.append(clock.now_s - 100))
    clock.run(lines, 5)
    assert not said
    clock.run(lines, 595)
    assert said == [5, 65, 125, 185, 245, 305, 365, 425, 485, 545]
    lines.close()
    said.clear()
    clock.run(lines, 5)
    assert not said, "another pass begins"


def test_a_line_says_how_far_it_is_and_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch):
    clock, said = Clock(monkeypatch), list[str]()
    lines = ProgressLines(said.append)
    clock.run(lines, 4, Progress("listing shards", 12_000))
    clock.run(lines, 2, Progress("listing shards", 13_000))
    clock.run(lines, 60)
    assert said == [
        "listing shards for 5 s: 13,000 so far",
        "indexing shards for 59 s: 1,200 of 50,000 shards, 1.00 of 5.00 GB, about 4 min left",
    ]


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress("listing s3://b/x"), "listing s3://b/x for 8 s"),
        (Progress("listing s3://b/x", remark="No answer"), "listing s3://b/x for 8 s. No answer"),
        (
            Progress("read", done_bytes=10**9, num_bytes=10**12),
            "read for 8 s: 1.00 of 1000.00 GB, about 2.2 h left",
        ),
        (Progress("read", 1, 2, 0, 10**9), "read for 8 s: 1 of 2 shards, 0.00 of 1.00 GB"),
        (
            Progress("read", 1, 9, 10**8, 2 * 10**9),
            "read for 8 s: 1 of 9 shards, 0.10 of 2.00 GB, about 3 min left",
        ),
    ],
)
def test_words(progress: Progress, words: str):
    assert progress.in_words(8.0) == words


def test_names_in_a_line_obey_no_terminal_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch):
    clock, said = Clock(monkeypatch), list[str]()
    clock.run(ProgressLines(said.append), 6, Progress("listing s3://key:secret@b/\x1b[2J\n"))
    assert said == ["listing s3://***@b/\\x1b[2J\\n for 5 s"]


@pytest.mark.parametrize(("show", "num_lines"), [(None, 1), (False, 0)])
def test_without_a_terminal_it_is_a_warning_that_can_be_silenced(
    show: bool | None, num_lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for level, expected in ((logging.WARNING, num_lines), (logging.ERROR, 0)):
        caplog.clear()
        caplog.set_level(level, "loaderd")
        with monkeypatch.context() as patched:
            clock = Clock(patched)
            display = ProgressDisplay(show)
            for _ in range(7):
                display(INDEXING)
                clock.now_s += 1
            display.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"] * expected


def test_a_bar_shows_what_is_done_and_is_taken_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    display = ProgressDisplay(True)
    display(Progress("listing shards", 300))
    display(INDEXING)
    display.close()
    assert "listing shards: 300 so far" in shown.getvalue() and "1.0/5.0 GB" in shown.getvalue()


def test_without_rich_lines_take_the_place_of_a_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setitem(sys.modules, "rich", None)
    Clock(monkeypatch).run(ProgressDisplay(True), 6, INDEXING)
    assert shown.getvalue() == "" and [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_caller_in_a_long_call_shows_it_from_a_thread():
    display, shown, has_come = ProgressDisplay(False), list[str](), threading.Event()

    def progress() -> Progress:
        shown.append(threading.current_thread().name)
        has_come.set()
        return INDEXING

    with display.repeating(progress):
        assert has_come.wait(30)
    assert set(shown) == {"loaderd-progress"}
    assert "loaderd-progress" not in [thread.name for thread in threading.enumerate()]
