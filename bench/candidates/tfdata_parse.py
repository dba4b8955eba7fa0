"""tf.data's reading and parsing alone: what the packed bytes cost before anything is unpacked."""

from __future__ import annotations

from collections.abc import Iterator

from candidates._tfdata import cannot_parse, consume, decoded
from harness.interface import Config, Step

NOTE = ""


def cannot(config: Config) -> str | None:
    return cannot_parse(config.delivered()) if config.packed else "it unpacks nothing; give it the option packed"


def steps(config: Config) -> Iterator[Step]:
    return consume(decoded(config, lambda stored: stored), config)
