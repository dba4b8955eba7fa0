"""What a loader or a command shows on standard error: a progress bar while shards are read from front to back."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from loaderd.logs import make_readable


class IndexProgress:
    """Called with bytes done and bytes in all; shows a bar from the first call on."""

    def __init__(self, show: bool | None, doing: str = "indexing shards") -> None:
        """``show``: True, False, or None for "if standard error is a terminal". A service may have no standard error.

        ``doing``: what stands beside the bar.
        """
        self._doing = doing
        self._show = (_is_terminal() if show is None else show) and not _is_gone()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if not self._show:
            return
        try:
            self._update(done_bytes, total_bytes)
        except (OSError, ValueError):  # standard error can't be written to any more: a bar is not worth an error
            self._show, self._bar = False, None

    def _update(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            self._bar = Progress(
                self._doing,
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("index", total=total_bytes)
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes)

    def close(self) -> None:
        """Take the bar away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.stop()


def _is_gone() -> bool:
    return sys.stderr is None or getattr(sys.stderr, "closed", False)


def _can_be_said(record: logging.LogRecord) -> bool:
    """Without a handler of the program's, logging writes to standard error, and raises ValueError if it is closed."""
    return not _is_gone() or logging.getLogger(record.name).hasHandlers()


logging.getLogger("loaderd").addFilter(_can_be_said)
logging.getLogger("loaderd").addFilter(make_readable)


def _is_terminal() -> bool:
    return not _is_gone() and sys.stderr.isatty()
