"""loaderd's server over the network, on loopback: the consumer's own workers ask for packed rows, and unpack them."""

from __future__ import annotations

from collections.abc import Iterator

from candidates._served import over_network
from harness.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    return over_network(config, 1)
