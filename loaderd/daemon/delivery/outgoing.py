"""What a stream has to say to its consumer beside the batches; and what it hands to one who reads no page."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from loaderd.daemon.pool.tasks import Fault
from loaderd.errors import LoaderdError, ShardError


class Omission(NamedTuple):
    """Of batch ``step``, ``num_skipped`` records are left out because of ``errors``."""

    step: int
    num_skipped: int
    errors: tuple[LoaderdError, ...]


class Delivery(NamedTuple):
    """Batch ``step`` is in ``slot``, ``num_records`` of it; something may have been left out."""

    step: int
    slot: int
    num_records: int
    omission: Omission | None = None


class BrokenBatch(NamedTuple):
    """Batch ``step`` cannot be delivered."""

    step: int
    error: LoaderdError


class PassEnd(NamedTuple):
    """The pass is over."""


Note = Omission | BrokenBatch
Outgoing = Delivery | BrokenBatch | PassEnd

_MOST_SAID = 4096
"""Damages that are named ahead: some 3 MB of messages, where a server lets 4 MiB lie unread."""
_OF_A_BATCH = 16
"""What a message about a batch counts for, beside the damages that it names."""


class SaidAhead:
    """What a consumer was told of damaged batches that it has not come to yet: no more than may lie unread."""

    def __init__(self) -> None:
        self._said: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, step: int, num_damages: int) -> None:
        """It is told of so many of batch ``step``."""
        self._said.append((step, _OF_A_BATCH + num_damages))
        self._total += _OF_A_BATCH + num_damages

    def come_to(self, step: int) -> None:
        """It takes this batch next, and has read of all before."""
        while self._said and self._said[0][0] < step:
            self._total -= self._said.popleft()[1]

    def has_room(self, num_damages: int = 0) -> bool:
        """Whether it may be told of so many more; of one batch, always."""
        return not self._said or self._total + num_damages <= _MOST_SAID

    def clear(self) -> None:
        """It takes none of these any more."""
        self._said.clear()
        self._total = 0


def note_of(step: int, num_rows: int, bad: Sequence[Fault], skip_damaged: bool) -> Note:
    """What there is to say of a batch of ``num_rows`` rows, which ``bad`` ones are among: a fault for each."""
    errors = tuple({id(fault): fault.error for fault in bad}.values())
    if skip_damaged and len(bad) < num_rows:
        return Omission(step, len(bad), errors)
    error = _all_in_one(errors)
    return BrokenBatch(step, _nothing_left(step, num_rows, error) if skip_damaged else error)


def num_damages(item: Delivery | BrokenBatch) -> int | None:
    """How many damages are named with a batch; None: nothing is said of it."""
    if isinstance(item, BrokenBatch):
        return len(item.error.damages)
    return None if item.omission is None else item.omission.num_skipped


def _all_in_one(errors: Sequence[LoaderdError]) -> LoaderdError:
    """The first of the errors of one batch, which names the damages of all."""
    first = errors[0]
    if len(errors) == 1:
        return first
    return type(first)(
        f"{first.message} (and {len(errors) - 1} more in this batch)",
        hint=first.hint,
        damages=tuple(damage for error in errors for damage in error.damages),
        traceback=first.traceback,
    )


def _nothing_left(step: int, num_rows: int, error: LoaderdError) -> LoaderdError:
    """An empty batch would make a loss that is no number, so there is none."""
    return ShardError(
        f"none of the {num_rows} records of batch {step} is left; the first: {error.message}",
        hint="Ask for the next batch to go on without it.",
        damages=error.damages,
    )
