"""What a stream tells its consumers besides batches: which batches it cannot make, and which records others lack."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loaderd.errors import HOW_TO_GO_ON_BEHIND, EmptyBatchError, LoaderdError
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import LoadFault

Note = BatchFailed | RecordsSkipped

_MOST_SAID = 4096
"""How many damages may be named ahead: some 3 MB of messages. (A server lets 4 MiB lie unread.)"""
_OF_A_BATCH = 16
"""A message about a batch counts as so many damages, besides those that it names."""


class UnreadNotices:
    """What a consumer was told of damaged batches that it has not come to yet: no more than may lie unread."""

    def __init__(self) -> None:
        self._said: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, step: int, num_damages: int) -> None:
        """The consumer is told of ``num_damages`` damages of batch ``step``."""
        self._said.append((step, _OF_A_BATCH + num_damages))
        self._total += _OF_A_BATCH + num_damages

    def come_to(self, step: int) -> None:
        """The consumer takes this batch next, and has read what it was told of those before."""
        while self._said and self._said[0][0] < step:
            self._total -= self._said.popleft()[1]

    def has_room(self, num_damages: int = 0) -> bool:
        """Whether the consumer may be told of so many more damages. If nothing lies unread, it always may."""
        return not self._said or self._total + num_damages <= _MOST_SAID

    def clear(self) -> None:
        """Forget all: the consumer takes none of these batches any more."""
        self._said.clear()
        self._total = 0


def note_of(generation: int, step: int, num_rows: int, bad: Sequence[LoadFault], skip_damaged: bool) -> Note:
    """What to say of a batch of ``num_rows`` rows; ``bad``: the fault of each row that cannot be delivered."""
    errors = tuple({id(fault): fault.error for fault in bad}.values())
    if skip_damaged and len(bad) < num_rows:
        return RecordsSkipped(generation, step, errors, len(bad))
    error = _all_in_one(errors)
    return BatchFailed(generation, step, _nothing_left(step, num_rows, error) if skip_damaged else error)


def _all_in_one(errors: Sequence[LoaderdError]) -> LoaderdError:
    """One error for all errors of a batch: the first, with the damages of all."""
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
    """The error in place of an empty batch, of which the loss would not be a number."""
    return EmptyBatchError(
        f"none of the {num_rows} records of batch {step} is left; the first: {error.message}",
        hint=HOW_TO_GO_ON_BEHIND,
        damages=error.damages,
    )
