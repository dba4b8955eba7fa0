"""What there is, and in which order: a data set without a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loaderd.options import OnCorrupt, Shuffle
from loaderd.schema import Schema


@dataclass(frozen=True)
class Dataset:
    """The description of a data set; nothing is read until a :class:`~loaderd.Loader` is made of it.

    The arguments are those of the same names of ``Loader``. The batch size, the position and the host belong to the
    consumer, and so to the loader.
    """

    shards: Any
    schema: Schema
    shuffle: bool | Shuffle = True
    seed: int = 0
    on_corrupt: OnCorrupt = "raise"
    index_cache: str = "user"
