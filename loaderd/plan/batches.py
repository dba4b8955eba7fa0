"""Which rows are in batch k: arithmetic on integers, no state.

A **pass** is what one iteration delivers: ``epochs`` epochs (for ever, if that is None). It may begin in the middle
of its first epoch. Its windows are numbered from 0 through all of its epochs, and so are its batches: the number of a
batch is its **step**. ``remainder`` says what becomes of an epoch's last rows, which do not fill a batch:

- ``"drop"``: they are left out (with shuffling, other rows each epoch);
- ``"short"``: they make a smaller batch;
- ``"carry"``: the next epoch's first rows complete their batch; only the last batch of the pass may be smaller.

All hosts have the same number of batches. A host that has one row less than another, and would have one batch less,
takes a row from its last batch but one to make a last batch. (If a host has fewer rows than batches, its last batches
are empty.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from loaderd.options import Remainder
from loaderd.plan.shares import EpochRemainder, HostShare, split_evenly


class Segment(NamedTuple):
    """Places ``start`` to ``stop - 1`` of a window (numbered through the pass), which lies in ``arena``.

    ``arena``: -1 in a plan, which is made before the window is loaded.
    """

    window: int
    start: int
    stop: int
    arena: int = -1


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one host's pass; ``first`` is what the host gets of the first epoch."""

    first: HostShare
    batch_size: int
    remainder: Remainder
    epochs: int | None

    # ------------------------------------------------------------------------------------------ epochs

    def share_of(self, epoch: int) -> HostShare:
        """What this host gets of an epoch of the pass."""
        if epoch == 0:
            return self.first
        if self.remainder != "carry":
            return self._whole(self.first.host)
        # In each epoch other hosts get a row more, so that over the whole pass hosts differ by a row at most.
        return self._whole((self.first.host - self._all_rows_before(epoch)) % self.first.num_hosts)

    @cached_property
    def _whole(self) -> Callable[[int], HostShare]:
        """What a host gets of a whole epoch: made when it is asked for, as there may be thousands of hosts."""
        whole = EpochRemainder(self.first.rest.num_records)
        return cache(lambda host: replace(self.first, rest=whole, host=host))

    def _all_rows_before(self, epoch: int) -> int:
        """Rows of all hosts in front of an epoch of the pass."""
        return 0 if epoch == 0 else self.first.rest.size + (epoch - 1) * self.first.rest.num_records

    def _rows_before(self, epoch: int, host: int) -> int:
        """Rows of ``host`` in front of an epoch of the pass."""
        if self.remainder == "carry":
            return split_evenly(self._all_rows_before(epoch), self.first.num_hosts, host)
        if epoch == 0:
            return 0
        return split_evenly(self.first.rest.size, self.first.num_hosts, host) + (epoch - 1) * self._whole(host).size

    def _epoch_of_row(self, row: int, host: int) -> int:
        """The epoch of the pass that row ``row`` of ``host`` is in: the last with at most ``row`` rows before it."""
        if self.remainder == "carry":
            first, size, row = self.first.rest.size, self.first.rest.num_records, row * self.first.num_hosts + host
        else:
            first, size = self._rows_before(1, host), self._whole(host).size
        return 0 if row < first else 1 + (row - first) // size

    # ------------------------------------------------------------------------------------------- steps

    @cached_property
    def steps_per_epoch(self) -> int:
        """Batches that begin in one whole epoch ("carry": in the first of a pass)."""
        return self._steps_in(self._whole(0))

    @cached_property
    def _first_steps(self) -> int:
        return self._steps_in(self.first)

    def _steps_in(self, share: HostShare) -> int:
        if self.remainder == "drop":  # of the host with the fewest rows; else of that with the most
            return share.rest.size // share.num_hosts // self.batch_size
        return -(-split_evenly(share.rest.size, share.num_hosts, 0) // self.batch_size)

    @cached_property
    def num_steps(self) -> int | None:
        """Batches of the pass, on every host; None if it never ends."""
        if self.epochs is None:
            return None
        if self.remainder == "carry":
            return -(-self._rows_before(self.epochs, 0) // self.batch_size)
        return self._first_steps + (self.epochs - 1) * self.steps_per_epoch

    def place_of(self, step: int) -> tuple[int, int]:
        """(epoch of the pass, number of the batch in it) of ``step``. A batch belongs to the epoch where it begins.

        (With "carry": where it begins on host 0, so that all hosts agree.) ``num_steps`` has the place behind the
        pass: batch 0 of the epoch after its last.
        """
        if self.remainder != "carry":
            if step < self._first_steps:
                return 0, step
            epoch, batch = divmod(step - self._first_steps, self.steps_per_epoch)
            return 1 + epoch, batch
        epoch = self._epoch_of_row(step * self.batch_size, host=0)
        if self.epochs is not None:
            epoch = min(epoch, self.epochs)  # behind a short last batch, that row may lie further on
        return epoch, step - self._first_step_of(epoch)

    def step_at(self, epoch: int, batch: int) -> int:
        """The step that :meth:`place_of` splits into (``epoch``, ``batch``)."""
        return self._first_step_of(epoch) + batch

    def _first_step_of(self, epoch: int) -> int:
        if self.remainder == "carry":
            return -(-self._rows_before(epoch, 0) // self.batch_size)
        return 0 if epoch == 0 else self._first_steps + (epoch - 1) * self.steps_per_epoch

    # -------------------------------------------------------------------------------------------- rows

    @cached_property
    def _size(self) -> int | None:
        """Rows of this host in the pass; None if it never ends."""
        return None if self.epochs is None else self._rows_before(self.epochs, self.first.host)

    def rows_of(self, step: int) -> tuple[int, int]:
        """The rows of ``step`` as (start, stop), counted through all epochs of the pass."""
        if self.remainder == "carry":
            return self._rows_of_batch(step, self._size, self.num_steps)
        epoch, batch = self.place_of(step)
        start, stop = self._rows_in_epoch(epoch, batch)
        before = self._rows_before(epoch, self.first.host)
        return before + start, before + stop

    def is_made_to_end(self, step: int) -> bool:
        """Whether a host has had a row less in front of ``step`` than if the pass had more epochs ("carry")."""
        if self.remainder != "carry" or self.epochs is None or step + 1 != self.num_steps:
            return False
        fewest = self._rows_before(self.epochs, self.first.num_hosts - 1)
        return step < fewest <= step * self.batch_size

    def _rows_in_epoch(self, epoch: int, batch: int) -> tuple[int, int]:
        num_batches = self._first_steps if epoch == 0 else self.steps_per_epoch
        return self._rows_of_batch(batch, self.share_of(epoch).size, num_batches)

    def _rows_of_batch(self, batch: int, size: int | None, num_batches: int | None) -> tuple[int, int]:
        """The rows (start, stop) of ``batch`` if ``size`` rows make ``num_batches``: see the module's docstring."""
        start, stop = batch * self.batch_size, (batch + 1) * self.batch_size
        if size is None or num_batches is None or self.remainder == "drop":
            return start, stop
        left = num_batches - batch  # with this one; each is to have a row
        if size >= num_batches:
            return min(start, size - left), min(stop, size - left + 1)
        return min(start, size), min(stop, size)

    def taken_of(self, epoch: int, step: int) -> tuple[int, int]:
        """(host whose share of an epoch this host has, rows taken of that share) when ``step`` is the next batch."""
        share = self.share_of(epoch)
        rows = self.rows_of(step)[0] - self._rows_before(epoch, self.first.host)
        return share.host, min(max(rows, 0), share.size)

    def segments(self, step: int) -> list[Segment]:
        """Where the rows of ``step`` lie: stretches of windows, in order. About 6 µs."""
        if self.remainder != "carry":
            epoch, batch = self.place_of(step)
            return list(self._segments_in(epoch, *self._rows_in_epoch(epoch, batch)))
        start, stop = self.rows_of(step)
        segments: list[Segment] = []
        while start < stop:
            epoch = self._epoch_of_row(start, self.first.host)
            before = self._rows_before(epoch, self.first.host)
            end = min(stop, before + self.share_of(epoch).size)
            segments += self._segments_in(epoch, start - before, end - before)
            start = end
        return segments

    def _segments_in(self, epoch: int, start: int, stop: int) -> Iterator[Segment]:
        """Where rows ``start`` to ``stop - 1`` of an epoch's share lie."""
        share, first_window = self.share_of(epoch), self._first_window_of(epoch)
        while start < stop:
            window, begin, size = share.find(start)
            end = min(stop, begin + size)
            yield Segment(first_window + window, start - begin, end - begin)
            start = end

    # ----------------------------------------------------------------------------------------- windows

    def _first_window_of(self, epoch: int) -> int:
        return 0 if epoch == 0 else self.first.num_windows + (epoch - 1) * self._whole(0).num_windows

    def locate(self, window: int) -> tuple[int, int]:
        """(epoch of the pass, number in that epoch's share) of a window."""
        if window < self.first.num_windows:
            return 0, window
        epoch, index = divmod(window - self.first.num_windows, self._whole(0).num_windows)
        return 1 + epoch, index

    def last_step_in(self, window: int) -> int:
        """The last step that reads from ``window`` or from one before it (-1: none does)."""
        epoch, index = self.locate(window)
        share = self.share_of(epoch)
        row = share.begin_of(index) + share.size_of(index) - 1
        if self.remainder == "carry":
            return self._batch_of(self._rows_before(epoch, self.first.host) + row, self._size, self.num_steps)
        return self._first_step_of(epoch) + self._batch_of(row, share.size, self._steps_in(share))

    def _batch_of(self, row: int, size: int | None, num_batches: int | None) -> int:
        """The batch that ``row`` is in, as :meth:`_rows_of_batch` has it; the last one for a row that is in none."""
        batch = row // self.batch_size
        if num_batches is None:
            return batch
        following = batch + 1  # which may begin a row earlier
        if following < num_batches and self._rows_of_batch(following, size, num_batches)[0] <= row:
            return following
        return min(batch, num_batches - 1)

    @cached_property
    def max_windows_of_a_batch(self) -> int:
        """How many windows one batch can touch."""
        whole = self._whole(self.first.num_hosts - 1)
        smallest = whole.size // whole.num_windows
        most = (self.batch_size + smallest - 2) // smallest + 1
        if not self.first.rest.parts:
            return most
        # Parts may be small, so each window in which a batch can begin is looked at. Only with "carry" does a batch
        # reach from the first epoch into the next ones: then the most that it can touch there are added.
        ends = list(accumulate(self.first.size_of(window) for window in range(self.first.num_windows)))
        in_first = [bisect_right(ends, end - 2 + self.batch_size) - window + 1 for window, end in enumerate(ends)]
        return max([most, *[min(count, len(ends) - at) for at, count in enumerate(in_first)]]) + (
            most if self.remainder == "carry" else 0
        )

    @cached_property
    def largest_window(self) -> int:
        """Rows of the largest window."""
        return max(self.first.largest_window, self._whole(0).largest_window)
