"""Which rows are in batch k: arithmetic on integers, no state.

A **pass** is what one iteration delivers: ``epochs`` epochs from ``first_epoch`` on (for ever, if ``epochs`` is
None). Its windows are numbered through, and so are its batches, the **steps**. What becomes of the end of an epoch is
the ``remainder``:

- ``"drop"``: the rows that fill no batch are left out (another few each epoch, when shuffled);
- ``"short"``: they make a smaller batch;
- ``"carry"``: they are completed from the next epoch; only the last batch of the last epoch may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loaderd.options import Remainder
from loaderd.plan.epoch import HostShare


@dataclass(frozen=True, slots=True)
class Segment:
    """Places ``start`` to ``stop - 1`` of a window (numbered through the pass)."""

    window: int
    start: int
    stop: int


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one host's pass."""

    share: HostShare
    batch_size: int
    remainder: Remainder
    epochs: int | None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Batches that begin in one epoch ("carry": in the first)."""
        if self.remainder == "drop":
            return self.share.smallest_size // self.batch_size
        return -(-self.share.size // self.batch_size)

    @cached_property
    def num_steps(self) -> int | None:
        """Batches of the pass; None if it never ends."""
        if self.share.num_records == 0:
            return 0
        if self.epochs is None:
            return None if self.share.size and self.steps_per_epoch else 0
        if self.remainder == "carry":
            return -(-self.epochs * self.share.size // self.batch_size)
        return self.epochs * self.steps_per_epoch

    def place_of(self, step: int) -> tuple[int, int]:
        """(epoch of the pass, number of the batch in it) of ``step``; a batch belongs to where it begins.

        ``num_steps`` itself is the place behind the pass: batch 0 of the epoch after its last.
        """
        if self.remainder != "carry":
            return divmod(step, self.steps_per_epoch)
        epoch = step * self.batch_size // self.share.size
        if self.epochs is not None:
            epoch = min(epoch, self.epochs)  # behind a last batch that is short, and larger than an epoch
        return epoch, step - self._first_step_of(epoch)

    def step_at(self, epoch: int, batch: int) -> int:
        """The step that :meth:`place_of` splits into (``epoch``, ``batch``)."""
        return self._first_step_of(epoch) + batch

    def _first_step_of(self, epoch: int) -> int:
        if self.remainder != "carry":
            return epoch * self.steps_per_epoch
        return -(-epoch * self.share.size // self.batch_size)

    def rows_of(self, step: int) -> tuple[int, int]:
        """The rows of ``step`` as (start, stop), counted through all epochs of the pass."""
        if self.remainder == "carry":
            start = step * self.batch_size
            end = start + self.batch_size if self.epochs is None else self.epochs * self.share.size
        else:
            epoch, batch = divmod(step, self.steps_per_epoch)
            start = epoch * self.share.size + batch * self.batch_size
            end = (epoch + 1) * self.share.size
        return start, min(start + self.batch_size, end)

    def segments(self, step: int) -> list[Segment]:
        """Where the rows of ``step`` lie: stretches of windows, in order."""
        start, stop = self.rows_of(step)
        found: list[Segment] = []
        while start < stop:
            epoch, row = divmod(start, self.share.size)
            window = self.share.window_of(row)
            begin = self.share.begin_of(window)
            take = min(stop - start, begin + self.share.size_of(window) - row)
            found.append(Segment(epoch * self.share.num_windows + window, row - begin, row - begin + take))
            start += take
        return found

    def last_step_in(self, window: int) -> int:
        """The last step that reads from ``window`` or from one before it (-1: none does)."""
        epoch, index = divmod(window, self.share.num_windows)
        row = self.share.begin_of(index) + self.share.size_of(index) - 1
        if self.remainder == "carry":
            return (epoch * self.share.size + row) // self.batch_size
        return epoch * self.steps_per_epoch + min(row // self.batch_size, self.steps_per_epoch - 1)

    @cached_property
    def max_windows_of_a_batch(self) -> int:
        """How many windows one batch can touch."""
        smallest = self.share.size // self.share.num_windows
        return 1 if smallest == 0 else (self.batch_size + smallest - 2) // smallest + 1
