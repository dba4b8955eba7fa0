"""What a stream has to say to its consumer beside the batches; and what it hands to one who reads no page."""

from __future__ import annotations

from dataclasses import dataclass

from loaderd.errors import LoaderdError


@dataclass(frozen=True)
class Fault:
    """Places of a window whose records cannot be delivered, and why."""

    places: tuple[int, ...]
    error: LoaderdError


@dataclass(frozen=True)
class Omission:
    """Of batch ``step``, ``num_skipped`` records are left out because of ``errors``."""

    step: int
    num_skipped: int
    errors: tuple[LoaderdError, ...]


@dataclass(frozen=True)
class Delivery:
    """Batch ``step`` is in ``slot``, ``num_records`` of it; something may have been left out."""

    step: int
    slot: int
    num_records: int
    omission: Omission | None = None


@dataclass(frozen=True)
class BrokenBatch:
    """Batch ``step`` cannot be delivered."""

    step: int
    error: LoaderdError


@dataclass(frozen=True)
class PassEnd:
    """The pass is over."""


Note = Omission | BrokenBatch
Outgoing = Delivery | BrokenBatch | PassEnd
