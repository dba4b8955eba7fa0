"""A progress bar for the index pass, on a terminal."""

from __future__ import annotations

import sys
from typing import Any


class IndexProgress:
    """Called with bytes done and bytes in all; shows a bar from the first call on."""

    def __init__(self, show: bool | None) -> None:
        """``show``: True, False, or None for "if standard error is a terminal"."""
        self._show = sys.stderr.isatty() if show is None else show
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if not self._show:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            self._bar = Progress(
                "indexing shards",
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
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
