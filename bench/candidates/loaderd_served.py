"""loaderd's server on the same machine, one consumer, its batches taken in Python as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator

from candidates._served import consume, served
from harness.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    with served(config) as address:
        yield from consume(address)
