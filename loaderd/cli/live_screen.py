"""What ``loaderd top`` and ``loaderd status --watch`` have in common: a screen that is drawn again every second."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from loaderd.cli.standard_output import OutputError
from loaderd.errors import OptionError, install_hint
from loaderd.progress import has_rich

if TYPE_CHECKING:
    from rich.console import RenderableType

_INTERVAL_S = 1.0


def needs_rich(what: str) -> None:
    """Raise OptionError where rich, which draws tables and bars, is not installed."""
    if not has_rich():
        raise OptionError(f"{what} needs rich: {install_hint('console')}")


def watch(show: Callable[[], RenderableType]) -> NoReturn:
    """Draw what ``show`` returns on the whole terminal, every second, until a signal.

    A signal ends the process at once, whatever ``show`` waits for. Raises OutputError once the terminal is gone:
    SIGHUP only comes from the terminal that controls the process, and rich writes nothing where there is none.
    """
    from rich.control import Control
    from rich.live import Live

    live, terminal = Live(auto_refresh=False, screen=True), sys.stdout.fileno()
    leave = f"{Control.show_cursor(True)}{Control.alt_screen(False)}".encode()

    def end(number: int, frame: FrameType | None) -> None:
        # No exception: threads that ask a server would be waited for.
        if live.is_started:
            with suppress(OSError):  # a terminal that is gone sends SIGHUP
                os.write(terminal, leave)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    live.update(show())
    with live:
        while os.isatty(terminal):
            time.sleep(_INTERVAL_S)
            live.update(show(), refresh=True)
        raise OutputError(OSError(errno.EIO, os.strerror(errno.EIO)))
