"""The search by halves for the records to blame, where all of a batch were tried together and failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Rows = tuple[int, ...]


class HalvingSearch:
    """Gives out halves of ``rows``, and halves of those that fail, the first rows first, down to single ones."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._waiting: deque[Rows] = deque()
        self._add_halves(tuple(rows))

    def __bool__(self) -> bool:
        """Whether there is something left to try."""
        return bool(self._waiting)

    def next(self) -> Rows:
        """The rows to try next."""
        return self._waiting.popleft()

    def failed(self, rows: Rows) -> bool:
        """Rows that were tried have failed; returns whether it is a single one, which is to blame."""
        if len(rows) > 1:
            self._add_halves(rows)
        return len(rows) == 1

    def _add_halves(self, rows: Rows) -> None:
        middle = (len(rows) + 1) // 2
        self._waiting.extendleft(half for half in (rows[middle:], rows[:middle]) if half)
