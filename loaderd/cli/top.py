"""``loaderd top``: all loaders of this user, live in a terminal. It only reads their pages of shared memory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loaderd.cli.live_screen import needs_rich, watch
from loaderd.errors import OptionError
from loaderd.observe.remedies import Verdict
from loaderd.observe.running_streams import RunningStream, running_streams
from loaderd.observe.top_rows import Row, row_of, short
from loaderd.redaction import readable_line
from loaderd.snapshots import span

if TYPE_CHECKING:
    from rich.console import RenderableType

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_FIND_EVERY_S = 3.0


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "top",
        epilog="example: loaderd top --once",
        description="Show your running loaders, every second, until Ctrl-C.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("pids", nargs="*", type=int, metavar="PID", help="only the trainings of these processes")
    parser.add_argument("--once", action="store_true", help="print one screen and exit; needs no terminal")


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 without a terminal or rich. Without ``--once``, a signal ends it."""
    try:
        needs_rich("loaderd top")
    except OptionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    from rich.console import Console

    streams = _Streams(frozenset(arguments.pids))
    console = Console(width=None if sys.stdout.isatty() else 200)
    if arguments.once:
        console.print(screen(streams.rows(), console.width))
        return 0
    if not sys.stdout.isatty():
        sys.stderr.write("loaderd top needs a terminal. Without one, use: loaderd top --once\n")
        return 1
    watch(lambda: screen(streams.rows(), console.width))


class _Streams:
    """The running streams. Each call reads them, but new ones are looked for every few seconds only."""

    def __init__(self, pids: frozenset[int]) -> None:
        self._pids = pids
        self._found: list[RunningStream] = []
        self._found_s = -_FIND_EVERY_S

    def rows(self) -> list[Row]:
        now_s = time.monotonic()
        if now_s - self._found_s >= _FIND_EVERY_S:
            self._found_s = now_s
            self._found = running_streams(self._pids)
        sampled = [(one, one.watched.samples()) for one in self._found]
        return [
            row_of(one.consumer, one.command, samples, one.watched.facts, now_s)
            for one, samples in sampled
            if samples
        ]


@dataclass(frozen=True)
class _Column:
    """``cell``: text, or a share from 0 to 1, which is drawn as a bar.

    ``min_width``: narrower terminals leave it out. ``ratio``: its share of the width that is left; 0: none.
    """

    title: str
    cell: Callable[[Row], str | float]
    min_width: int = 0
    is_number: bool = True
    ratio: int = 0


_COLUMNS = (
    _Column("process", lambda row: str(row.pid)),
    _Column("records/s", lambda row: f"{row.records_per_s:,.0f}"),
    _Column("steps/s", lambda row: f"{row.steps_per_s:,.1f}"),
    _Column("waiting", lambda row: row.waiting),
    _Column("", lambda row: f"{row.waiting:.0%}"),
    _Column("slots", lambda row: row.now.slots_full / max(1, row.facts.slots), 100),
    _Column("windows", lambda row: row.now.windows_ready / max(1, row.facts.windows), 100),
    _Column("epoch", lambda row: str(row.now.epoch), 100),
    _Column("batch", lambda row: f"{row.now.batch:,} of {row.facts.steps_per_epoch:,}", 130),
    _Column("left", lambda row: span(row.left_s)),
    _Column("restarts", lambda row: str(row.now.workers_restarted or ""), 130),
    _Column("damaged", lambda row: str(row.now.damaged or ""), 130),
    _Column("verdict", lambda row: "silent" if row.is_old else row.verdict, is_number=False),
    _Column("workers", lambda row: row.workers, 100, is_number=False, ratio=3),
    _Column("command", lambda row: short(row.name), 160, is_number=False, ratio=2),
)

# Rows of other verdicts are yellow: these trainings wait for data.
_STYLES: dict[Verdict, str] = {
    "the model": "",
    "the consumer's Python": "",
    "nothing yet": "",
    "storage does not answer": "bold red",
    "the servers do not answer": "bold red",
}


def screen(rows: list[Row], width: int) -> RenderableType:
    """All rows, by process, as a table of ``width`` characters."""
    from rich.bar import Bar
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(f"loaderd top: {len(rows)} loaders", style="bold")
    columns = [column for column in _COLUMNS if width >= column.min_width]
    table = Table(box=None, pad_edge=False, expand=True)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, ratio=column.ratio or None)
    for row in sorted(rows, key=lambda row: row.pid):
        style = "dim" if row.is_old else _STYLES.get(row.verdict, "yellow")
        cells = [column.cell(row) for column in columns]
        table.add_row(
            *[Text(readable_line(cell)) if isinstance(cell, str) else Bar(1, 0, cell, width=8) for cell in cells],
            style=style,
        )
    return Group(head, table) if rows else Group(head, Text("No loader is running."))
