"""What a server counts for Prometheus. A process sends its totals with each report; the supervisor keeps those of
processes that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_NAMES = 64
OTHERS = "(others)"
OF_CONSUMERS = ("batches", "records", "bytes", "waiting_seconds", "remote_requests", "remote_records", "remote_bytes")

WireTotal = tuple[str, str, str, float]
"""(what is counted, data set, label, sum)."""


class Totals:
    """Sums by what is counted, data set and label: a consumer's name, a stage, a kind of process or of connection.

    Consumers choose their names: the first ``MAX_NAMES`` have sums of their own, all others share one.
    """

    def __init__(self) -> None:
        self.sums: Counter[tuple[str, str, str]] = Counter()
        self._names: set[str] = set()

    def add(self, what: str, dataset: str, label: str, number: float) -> None:
        if what in OF_CONSUMERS and label not in self._names:
            label = label if len(self._names) < MAX_NAMES else OTHERS
            self._names.add(label)
        self.sums[what, dataset, label] += number  # type: ignore[assignment]  # some are seconds

    def copy(self) -> Totals:
        """To go on from here. Both give the same names sums of their own."""
        other = Totals()
        other.sums, other._names = self.sums.copy(), self._names
        return other

    def to_wire(self) -> list[WireTotal]:
        """For :meth:`add_wire`."""
        return [(*key, float(number)) for key, number in self.sums.items()]

    def add_wire(self, sums: Iterable[WireTotal]) -> None:
        """Add the totals of a process."""
        for what, dataset, label, number in sums:
            self.add(what, dataset, label, number)
