"""How far a long pass over shards is, on standard error: a bar on a terminal, if rich is installed;
else a line in the log after 5 s, and then one a minute. What is quick says nothing.

Whoever makes progress calls a ``ProgressDisplay``, which has no thread; a caller that may be stuck in one call wraps
it in :meth:`ProgressDisplay.repeating`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from loaderd.redaction import make_readable, readable_line
from loaderd.snapshots import Progress

FIRST_LINE_S, _NEXT_LINE_S = 5.0, 60.0
_REPEAT_S = 0.2
_logger = logging.getLogger("loaderd")


class ProgressLines:
    """Says a line of what it is called with, 5 s after the first call, and then once a minute."""

    def __init__(self, say: Callable[[str], None] = _logger.warning) -> None:
        """``say``: by default a warning of the logger "loaderd", for what is below that is not shown by default."""
        self._say = say
        self._doing = ""
        self._began_s = 0.0
        self._due_s: float | None = None

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if self._due_s is None:
            self._due_s = now_s + FIRST_LINE_S
        if progress.doing != self._doing:
            self._doing, self._began_s = progress.doing, now_s
        if now_s >= self._due_s:
            self._due_s = now_s + _NEXT_LINE_S
            self._say(readable_line(progress.in_words(now_s - self._began_s)))

    def close(self) -> None:
        """The pass is over; the next call begins another one."""
        self._due_s, self._doing = None, ""


class ProgressDisplay:
    """Shows a ``Progress``, as a bar or in lines."""

    def __init__(self, show: bool | None) -> None:
        """``show``: True, a bar; False, nothing; None: a bar if standard error is a terminal, else lines.

        Without rich (the extra ``console``), there are lines instead of a bar. A service may have no standard error.
        Then there are lines in its log, if it has one.
        """
        self._bar: _Bar | None = None
        self._lines: ProgressLines | None = None
        if (show or (show is None and _is_terminal())) and has_rich():
            self._bar = None if _is_gone() else _Bar()
        elif show is not False:
            self._lines = ProgressLines()

    def __call__(self, progress: Progress) -> None:
        if self._lines is not None:
            self._lines(progress)
        if self._bar is not None:
            try:
                self._bar.update(progress)
            except (OSError, ValueError):  # standard error can't be written to any more: a bar is not worth an error
                self._bar = None

    @contextlib.contextmanager
    def repeating(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Show what ``progress`` returns, in a thread of its own, again and again while the caller is in a call."""
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(_REPEAT_S):
                self(progress())

        thread = threading.Thread(target=repeat, name="loaderd-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Take the bar away; the next call begins another pass."""
        if self._lines is not None:
            self._lines.close()
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """A bar from the first update on."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._doing = ""
        self._task: Any = None

    def update(self, progress: Progress) -> None:
        doing = progress.doing if progress.num_bytes or not progress.done_shards else _counted(progress)
        if self._bar is None or progress.doing != self._doing:
            self.close()
            self._doing = progress.doing
            self._bar = _new_bar(bool(progress.num_bytes))
            self._task = self._bar.add_task(readable_line(doing), total=progress.num_bytes or None)
            self._bar.start()
        self._bar.update(self._task, description=readable_line(doing), completed=progress.done_bytes)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.stop()


def _new_bar(has_total: bool) -> Any:
    from rich import progress as rich
    from rich.console import Console

    of_total = [rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
    columns = of_total if has_total else [rich.TimeElapsedColumn()]
    text = rich.TextColumn("{task.description}", markup=False)
    return rich.Progress(text, rich.BarColumn(), *columns, console=Console(stderr=True), transient=True)


def _counted(progress: Progress) -> str:
    return f"{progress.doing}: {progress.done_shards:,} so far"


def _is_gone() -> bool:
    return sys.stderr is None or getattr(sys.stderr, "closed", False)


def _can_be_said(record: logging.LogRecord) -> bool:
    """Without a handler of the program's, logging writes to standard error, and raises ValueError if it is closed."""
    return not _is_gone() or logging.getLogger(record.name).hasHandlers()


_logger.addFilter(_can_be_said)
_logger.addFilter(make_readable)


def has_rich() -> bool:
    """Whether the extra ``console`` is installed."""
    from importlib.util import find_spec  # few need it

    return find_spec("rich") is not None


def _is_terminal() -> bool:
    return not _is_gone() and sys.stderr.isatty()
