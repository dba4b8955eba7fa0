"""Where a consumer stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The next batch that the consumer will take: number ``batch`` (from 0) of ``epoch`` (from 0)."""

    epoch: int
    batch: int
