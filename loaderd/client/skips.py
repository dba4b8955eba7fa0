"""Warns of what is left out, once of each kind: what the index pass left out, and each kind of error in an epoch.

What is left out is found while a message of the daemon is read, where nothing may be raised; but Python's filters may
make an error of a warning. So it is noted first, and :meth:`Skips.warn` is called where a batch is given out.
"""

from __future__ import annotations

import sys
import warnings

from loaderd.errors import LoaderdError, SkippedDataWarning
from loaderd.options import OnCorrupt
from loaderd.redaction import readable

_MORE = "loader.statistics() counts the records (records_skipped) and names them (damages)."


class Skips:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._noted: set[str] = set()
        self._waiting: list[str] = []

    def of_index(self, text: str) -> None:
        """The index pass left out what ``text`` says. An empty one: nothing."""
        self._note(text, text)

    def of_batch(self, error: LoaderdError, num_records: int, on_corrupt: OnCorrupt) -> None:
        """Records were left out of a batch because of ``error``; ``num_records``: of all batches so far."""
        records = "1 record is" if num_records == 1 else f"{num_records:,} records are"
        text = f'{records} left out of batches so far (on_corrupt="{on_corrupt}"). The first reason: {error.message}.'
        self._note(type(error).__name__, f"{text} {_MORE}")

    def _note(self, kind: str, text: str) -> None:
        if kind and kind not in self._noted:
            self._noted.add(kind)
            self._waiting.append(readable(text))

    def warn(self) -> None:
        """Warn of what was noted. Raises what the filters of ``warnings`` make of it."""
        while self._waiting:
            warnings.warn(self._waiting.pop(0), SkippedDataWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The ``stacklevel`` of the code that uses loaderd or one of its bindings, for the function that calls this."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("loaderd"):
        level, frame = level + 1, frame.f_back
    return level
