"""What is seen while a comparison runs: on a terminal a table that grows, elsewhere a line for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from harness.report import Run, Summary, table
from harness.rounds import BUSY_CORES
from loaderd.redaction import printable


class Display:
    """Drawn only between measurements: during one, the machine belongs to the candidate."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._summaries: Sequence[Summary] = ()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        self._console.print(printable(text), style=style, markup=False, highlight=False)

    def begin(self, what: str) -> None:
        """Show what is being done now."""
        if self._live is not None:
            shown: list[RenderableType] = [table(self._summaries, self._console)] if self._summaries else []
            self._live.update(Group(*shown, Text(what, style="dim")), refresh=True)

    def done(self, run: Run, summaries: Sequence[Summary]) -> None:
        """Show that a run has ended. ``summaries``: the table so far."""
        self._summaries = summaries
        disturbed = run["other_cores"] > BUSY_CORES
        note = f"  ({run['other_cores']:.2f} cores were busy elsewhere)" if disturbed else ""
        if self._live is None or note:
            place = f"round {run['round'] + 1}"
            self.say(f"{place}  {run['candidate']:28} {run['examples_per_s']:12,.0f} examples/s{note}")

    def finish(self, summaries: Sequence[Summary], facts: Mapping[str, str]) -> None:
        """Show the finished table, and the facts that its reader must know."""
        if self._live is not None:
            self._live.update(table(summaries, self._console), refresh=True)
        else:
            self._console.print(table(summaries, self._console))
        for name, value in facts.items():
            self.say(f"{name}: {value}")
