"""What each host gets of an epoch, as windows.

An epoch is divided into **rounds**. A round is a range of rows, with one window for each host; all hosts work on the
same round at a time. So when a round is over, the hosts together have taken all rows up to its end, and no others.
Every row is in exactly one window of one host, and the hosts' **shares** differ by one row at most.

Where the number of hosts changes in the middle of an epoch, what is left of it is a :class:`EpochRemainder`:
**parts** of the windows that hosts had begun, and the **tail**, which is all rows of the rounds that no host had
begun. The new hosts divide it among them: each gets an equal share of the parts, and then a window of each round of
the tail.

::

    2 hosts   │ window 0.0 ▓▓▓▓░░ │ window 0.1 ▓▓▓▓░░ │ window 1.0       │ window 1.1       │ …
    Rest                     ░░                  ░░   └──────── tail ──────────────────────────
    3 hosts   each a third of ░░░░, and then rounds of three windows over the tail
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


def split_evenly(total: int, parts: int, index: int) -> int:
    """The size of part ``index`` of ``total`` in ``parts`` parts that differ by one at most, larger ones first."""
    return total // parts + (index < total % parts)


def evenly_before(total: int, parts: int, index: int) -> int:
    """The sum of the parts in front of part ``index``: see :func:`split_evenly`."""
    return total // parts * index + min(index, total % parts)


class Window(NamedTuple):
    """Places ``first`` to ``stop - 1`` of the window that permutes rows ``start`` to ``start + size - 1``."""

    start: int
    size: int
    first: int
    stop: int

    @property
    def num_places(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class EpochRemainder:
    """What is left of an epoch of ``num_records`` rows: ``parts`` of windows, and all rows from ``tail`` on."""

    num_records: int
    parts: tuple[Window, ...] = ()
    tail: int = 0

    @cached_property
    def num_begun(self) -> int:
        """Rows in ``parts``."""
        return sum(part.num_places for part in self.parts)

    @property
    def num_tail(self) -> int:
        """Rows from ``tail`` on."""
        return self.num_records - self.tail

    @property
    def size(self) -> int:
        """Rows that are left."""
        return self.num_begun + self.num_tail

    def after(self, taken: Sequence[int], window_records: int) -> EpochRemainder:
        """What is left when host i of ``len(taken)`` hosts has taken ``taken[i]`` rows of its share."""
        shares = [HostShare(self, host, len(taken), window_records) for host in range(len(taken))]
        begun = max(share.rounds_begun(rows) for share, rows in zip(shares, taken, strict=True))
        parts = [
            part
            for share, rows in zip(shares, taken, strict=True)
            for part in share.windows_left(rows, share.num_parts + begun)
        ]
        return EpochRemainder(self.num_records, tuple(parts), shares[0].round_start(begun))


@dataclass(frozen=True)
class HostShare:
    """The windows that host ``host`` of ``num_hosts`` gets of ``rest``.

    A whole epoch is ``EpochRemainder(num_records)``. Rows are counted as the host takes them, from 0 to ``size - 1``.
    """

    rest: EpochRemainder
    host: int
    num_hosts: int
    window_records: int

    @cached_property
    def size(self) -> int:
        """Rows that this host gets."""
        return split_evenly(self.rest.size, self.num_hosts, self.host)

    @cached_property
    def num_windows(self) -> int:
        """Windows; none of them is empty."""
        return self.num_parts + (self._num_rounds if self._tail_size else 0)

    @cached_property
    def largest_window(self) -> int:
        """Rows of the largest window: ``window_records`` at most (one more where hosts differ by a row)."""
        tail = split_evenly(self._tail_size, self._num_rounds, 0) if self._num_rounds else 0
        return max([tail, *[part.num_places for part in self._parts]])

    def begin_of(self, window: int) -> int:
        """How many of this host's rows come before ``window``."""
        if window <= self.num_parts:
            return self._part_ends[window]
        return self._part_ends[-1] + evenly_before(self._tail_size, self._num_rounds, window - self.num_parts)

    def size_of(self, window: int) -> int:
        """Rows of ``window``."""
        if window < self.num_parts:
            return self._parts[window].num_places
        return split_evenly(self._tail_size, self._num_rounds, window - self.num_parts)

    def window(self, number: int) -> Window:
        """Where window ``number`` lies in the epoch."""
        if number < self.num_parts:
            return self._parts[number]
        size = self.size_of(number)
        round_ = number - self.num_parts
        start = self.rest.tail
        for host in range(self.num_hosts):
            rows = split_evenly(self.rest.num_tail, self.num_hosts, host)
            start += evenly_before(rows, self._num_rounds, round_)
            if host < self._tail_host:
                start += split_evenly(rows, self._num_rounds, round_)
        return Window(start, size, 0, size)

    def find(self, row: int) -> tuple[int, int, int]:
        """(number, first row, number of rows) of the window in which this host's row ``row`` is."""
        part_ends = self._part_ends
        lead = part_ends[-1]
        if row < lead:
            part = bisect_right(part_ends, row) - 1
            return part, part_ends[part], part_ends[part + 1] - part_ends[part]
        larger, small = self._tail_size % self._num_rounds, self._tail_size // self._num_rounds
        of_larger = larger * (small + 1)
        row -= lead
        if row < of_larger:  # these windows have a row more than those behind them
            number = row // (small + 1)
            return self.num_parts + number, lead + number * (small + 1), small + 1
        number = (row - of_larger) // small
        return self.num_parts + larger + number, lead + of_larger + number * small, small

    # ------------------------------------------------------------------- parts of windows that others began

    @cached_property
    def _parts(self) -> tuple[Window, ...]:
        begin = evenly_before(self.rest.num_begun, self.num_hosts, self.host)
        end = begin + split_evenly(self.rest.num_begun, self.num_hosts, self.host)
        own = []
        at = 0
        for part in self.rest.parts:
            first, stop = max(begin - at, 0), min(end - at, part.num_places)
            if first < stop:
                own.append(part._replace(first=part.first + first, stop=part.first + stop))
            at += part.num_places
        return tuple(own)

    @property
    def num_parts(self) -> int:
        """How many of the windows are parts of windows that others began: they come first."""
        return len(self._parts)

    @cached_property
    def _part_ends(self) -> list[int]:
        return list(accumulate((part.num_places for part in self._parts), initial=0))

    def windows_left(self, rows: int, stop: int) -> list[Window]:
        """What is left of the windows in front of window ``stop`` when ``rows`` rows are taken."""
        left = []
        for number in range(self.find(rows)[0] if rows < self.size else stop, min(stop, self.num_windows)):
            window = self.window(number)
            left.append(window._replace(first=window.first + max(0, rows - self.begin_of(number))))
        return left

    # --------------------------------------------------------------------------------------- rounds of the tail

    @cached_property
    def _tail_host(self) -> int:
        """The number of this host in the tail: hosts that got a row more of the parts get no row more of the tail."""
        return (self.host - self.rest.num_begun) % self.num_hosts

    @cached_property
    def _tail_size(self) -> int:
        return split_evenly(self.rest.num_tail, self.num_hosts, self._tail_host)

    @cached_property
    def _num_rounds(self) -> int:
        """Rounds of the tail: the same number on all hosts."""
        wanted = -(-split_evenly(self.rest.num_tail, self.num_hosts, 0) // self.window_records)
        return min(wanted, max(1, self.rest.num_tail // self.num_hosts))

    def rounds_begun(self, rows: int) -> int:
        """Of how many rounds this host has taken rows, if it has taken ``rows`` rows in all."""
        return 0 if rows <= self._part_ends[-1] else self.find(rows - 1)[0] - self.num_parts + 1

    def round_start(self, number: int) -> int:
        """The row of the epoch at which round ``number`` begins (the number of rounds: the end)."""
        if number == self._num_rounds:
            return self.rest.num_records
        shares = [split_evenly(self.rest.num_tail, self.num_hosts, host) for host in range(self.num_hosts)]
        return self.rest.tail + sum(evenly_before(share, self._num_rounds, number) for share in shares)
