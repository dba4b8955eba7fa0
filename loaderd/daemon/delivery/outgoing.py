"""What a stream has to say to its consumer beside the batches; and what it hands to one who reads no page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


def all_in_one(errors: Sequence[LoaderdError]) -> LoaderdError:
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


def nothing_left(step: int, num_rows: int, error: LoaderdError) -> LoaderdError:
    """An empty batch would make a loss that is no number, so there is none."""
    return ShardError(
        f"none of the {num_rows} records of batch {step} is left; the first: {error.message}",
        hint="Ask for the next batch to go on without it.",
        damages=error.damages,
    )
