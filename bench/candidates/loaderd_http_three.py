"""As ``loaderd_http``, with three servers of the same data set, over which the consumer spreads its requests."""

from __future__ import annotations

from collections.abc import Iterator

from candidates._served import over_network
from harness.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    return over_network(config, 3)
