"""The plan of one pass: which records its windows hold, and where in them the rows of its batches lie.

Joins the rows of each epoch (:mod:`loaderd.plan.rows`) with the batches (:mod:`loaderd.plan.batches`). Everything
here is a function of the constructor's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

from loaderd.errors import OptionError
from loaderd.options import is_count, require
from loaderd.plan.batches import BatchPlan, Segment
from loaderd.plan.epoch import Slice, WindowOrder, window_key
from loaderd.plan.rows import RowSequence
from loaderd.plan.shares import Window

_MAX_PAIRS = 1 << 20

Listing = tuple[tuple[str, str, int, str] | None, ...]
"""For each set: (path of an epoch's first shard, path of its last, number, digest); None: the set does not grow."""

HostChanges = tuple[tuple[int, ...], ...]
"""How many rows each host took of the first epoch: a tuple for each change of the number of hosts."""


def listing_of(values: Any) -> Listing | None:
    """A listing that came as lists. It may come from another machine: raises OptionError if it is none."""
    if values is None:
        return None
    require(isinstance(values, (list, tuple)), "a listing", "a list", values)
    for entry in values:
        is_entry = entry is None or (isinstance(entry, (list, tuple)) and [*map(type, entry)] == [str, str, int, str])
        require(is_entry, "what a listing says of a set", "its first shard, its last, how many and a digest", entry)
    return tuple(None if entry is None else tuple(entry) for entry in values)


def past_of(values: Any) -> HostChanges:
    """A past (see :class:`Pass`) that came as lists. Raises OptionError if it is none."""
    is_past = isinstance(values, (list, tuple)) and all(
        isinstance(taken, (list, tuple)) and taken and all(is_count(rows, 0) for rows in taken) for taken in values
    )
    require(is_past, "past", "of each change, how many rows each host had taken", values)
    check_changes(map(len, values))
    return tuple(tuple(map(int, taken)) for taken in values)


def check_changes(hosts: Iterable[int]) -> None:
    """Raise OptionError where the number of hosts changed too often in an epoch, ``hosts`` in front of each change.

    Planning what is left takes a microsecond for each pair of hosts, and other consumers may wait for it.
    """
    pairs = sum(number**2 for number in hosts)
    if pairs > _MAX_PAIRS:
        raise OptionError(
            "past has too many changes of hosts: the squares of their numbers of hosts may add up to "
            f"{_MAX_PAIRS:,}, got {pairs:,}"
        )


class Pass(NamedTuple):
    """Which pass: of ``epochs`` epochs (None: for ever) from ``first_epoch`` on.

    ``past``: for each change of the number of hosts in the first epoch, how many rows each of the hosts until then
    took of its share. ``listing``: if data sets grow, the shards that the pass is made of.
    """

    first_epoch: int
    epochs: int | None
    past: HostChanges = ()
    listing: Listing | None = None


def pass_of(values: Any) -> Pass:
    """A pass that came as a list, maybe from another machine. Raises OptionError if it is none.

    It does not check that the data have such a pass: ``PassSequence.batches`` does.
    """
    require(isinstance(values, (list, tuple)) and len(values) == 4, "a pass", "its four fields", values)
    first_epoch, epochs, past, listing = values
    require(is_count(first_epoch, 0), "first_epoch", "an integer from 0 on", first_epoch)
    require(epochs is None or is_count(epochs), "epochs", "a positive integer or None", epochs)
    return Pass(first_epoch, epochs, past_of(past), listing_of(listing))


class PassPlan:
    """The windows and the batches of the pass that begins at ``first_epoch``."""

    def __init__(self, rows: RowSequence, batches: BatchPlan, seed: int, shuffle: bool, first_epoch: int) -> None:
        self.batches = batches
        self.num_steps = batches.num_steps
        """Batches of the pass; None if it never ends."""
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._first_epoch = first_epoch
        # The daemon asks for a batch's segments several times: when it looks whether to grant it, and when it does.
        self.segments_of: Callable[[int], list[Segment]] = lru_cache(maxsize=16)(batches.segments)
        """Where the rows of a batch lie, by its step."""
        self.last_step_in = batches.last_step_in
        """The last batch that reads from a window or from one before it."""
        self._locate = lru_cache(maxsize=16)(self._find)

    @cached_property
    def last_window(self) -> int | None:
        """The last window that a batch reads from (-1: none does); None if the pass never ends."""
        if self.num_steps is None:
            return None
        steps = reversed(range(self.num_steps))
        return next((segments[-1].window for step in steps if (segments := self.batches.segments(step))), -1)

    def first_window_from(self, step: int) -> int:
        """The first window that batch ``step`` or one behind it reads from: a batch without rows reads from none."""
        steps = count(step) if self.num_steps is None else range(step, self.num_steps)
        return next((segments[0].window for step in steps if (segments := self.batches.segments(step))), 0)

    def _find(self, window: int) -> tuple[int, Window]:
        epoch, number = self.batches.locate(window)
        place = self.batches.share_of(epoch).window(number)
        if not self._shuffle:  # then a part is itself a window, and the rest need not be read
            place = Window(place.start + place.first, place.num_places, 0, place.num_places)
        return self._first_epoch + epoch, place

    def stop_of_run(self, step: int) -> int:
        """The step behind the batches from ``step`` on that lie one behind the other in a window, all of one size.

        Batch ``step`` has one segment.
        """
        (segment,) = self.segments_of(step)
        last = self.last_step_in(segment.window) - 1
        if last <= step:
            return step + 1
        size = segment.stop - segment.start
        start = segment.start + (last - step) * size
        is_run = self.segments_of(last) == [Segment(segment.window, start, start + size)]
        return last + 1 if is_run else step + 1

    def rows_of(self, window: int) -> int:
        """Rows to be loaded for ``window``: more than its places, if other hosts have delivered a part of it."""
        return self._locate(window)[1].size

    def slices_of(self, window: int) -> list[Slice]:
        """The records that make up ``window``, in order of row."""
        epoch, place = self._locate(window)
        return self._rows.slices(epoch, place.start, place.start + place.size)

    def order_of(self, window: int) -> WindowOrder:
        """Where the rows of ``window`` go."""
        epoch, place = self._locate(window)
        key = window_key(self._seed, epoch, place.start) if self._shuffle else None
        return WindowOrder(key, place.size, place.first, place.stop)

    def place_of(self, step: int) -> tuple[int, int]:
        """(epoch, number of the batch in it) of ``step``."""
        epoch, batch = self.batches.place_of(step)
        return self._first_epoch + epoch, batch
