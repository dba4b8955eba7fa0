"""The stages of a worker's work, and where the time that each of them takes is added up.

Times are nanoseconds of the wall clock: a wait for storage counts, and so does a wait for a core.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Stage(IntEnum):
    """What a worker does with records until they are rows of a window. The times of fields are kept behind these."""

    READ = 0
    INFLATE = 1
    FRAMES = 2
    """Finding where each record begins and ends. For compressed shards and damaged blocks, it counts as CHECK."""
    CHECK = 3
    PARSE = 4
    """Parsing records, and writing each row to its place."""


class StageTimes(Protocol):
    """Nanoseconds by stage, or by field: a list, or words of a page."""

    def __getitem__(self, stage: int, /) -> int: ...

    def __setitem__(self, stage: int, ns: int, /) -> None: ...
