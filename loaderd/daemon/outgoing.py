"""What a stream has to say to its consumer, in the order of the batches."""

from __future__ import annotations

from dataclasses import dataclass

from loaderd.errors import LoaderdError


@dataclass(frozen=True)
class Fault:
    """Places of a window whose records cannot be delivered, and why."""

    places: tuple[int, ...]
    error: LoaderdError


@dataclass(frozen=True)
class Delivery:
    """Batch ``step`` is in ``slot``, ``num_records`` of it; ``num_skipped`` were left out because of ``errors``."""

    step: int
    slot: int
    num_records: int
    num_skipped: int = 0
    errors: tuple[LoaderdError, ...] = ()


@dataclass(frozen=True)
class BrokenBatch:
    """Batch ``step`` cannot be delivered."""

    step: int
    error: LoaderdError


@dataclass(frozen=True)
class PassEnd:
    """The pass is over."""


Outgoing = Delivery | BrokenBatch | PassEnd
