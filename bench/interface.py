"""What a candidate is: one module in ``candidates/`` with one function, run in a process of its own.

A candidate reads the shards of a :class:`Config` and yields a :class:`Step` whenever batches have arrived::

    def steps(config: Config) -> Iterator[Step]: ...

It delivers ``board`` float32 (n, 8, 8, 24), ``flags`` float32 (n, 10) and ``score`` float32 (n,), decoded as
``reference.py`` says, n being ``config.batch_size`` but for a last short batch. It honours every field of the
config that means something to it, imports what it needs at the top of its module (imports are not timed), and
gives everything back when the generator is closed.

On the command line a candidate is its module's name, then options: ``tfdata_expert:noshuffle,graph``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Step(NamedTuple):
    """Batches that arrived: how many ``examples``, and the last batch as (board, flags, score).

    ``batch`` is None where no array reaches Python: the consumer is a ``tf.function``, or there is no content.
    The arrays may be of any type that ``numpy.asarray`` takes; they are read before the next step is asked for.
    """

    examples: int
    batch: tuple[Any, Any, Any] | None


@dataclass(frozen=True)
class Config:
    """One configuration. ``epochs=None``: for ever. ``graph``: consume inside a ``tf.function``."""

    shards: tuple[str, ...]
    compression: str = ""
    batch_size: int = 512
    epochs: int | None = None
    shuffle: bool = True
    graph: bool = False
    workers: int = 2


_OPTIONS: dict[str, dict[str, Any]] = {"noshuffle": {"shuffle": False}, "graph": {"graph": True}}


def configure(spec: str, base: Config) -> tuple[str, Config]:
    """The module's name and the config of ``spec``, as ``name`` or ``name:option,option``.

    Raises ValueError for an option that is none.
    """
    name, _, options = spec.partition(":")
    for option in filter(None, options.split(",")):
        if option not in _OPTIONS:
            raise ValueError(f"{spec}: option must be one of {sorted(_OPTIONS)}, got {option!r}")
        base = replace(base, **_OPTIONS[option])
    return name, base


def load(name: str) -> Callable[[Config], Iterator[Step]]:
    """The ``steps`` of candidate ``name``; imports it, and with it whatever it is built on."""
    steps: Callable[[Config], Iterator[Step]] = importlib.import_module(f"candidates.{name}").steps
    return steps
