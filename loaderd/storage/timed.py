"""Where the time of reading goes: reads of a file, and inflating what they bring."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from loaderd.stages import Stage, StageTimes
from loaderd.storage.shard_file import Readable


class TimedFile:
    """A file; the time that its reads take is added to ``spent``."""

    def __init__(self, file: Readable, spent: StageTimes) -> None:
        self._file = file
        self._spent = spent

    def read_at(self, offset: int, view: memoryview) -> int:
        began_ns = time.monotonic_ns()
        try:
            return self._file.read_at(offset, view)
        finally:
            self._spent[Stage.READ] += time.monotonic_ns() - began_ns


@contextlib.contextmanager
def inflating(spent: StageTimes) -> Iterator[None]:
    """The time in this context counts as inflating, except for the reads in it, which count as reading."""
    began_ns = time.monotonic_ns() - spent[Stage.READ]
    try:
        yield
    finally:
        spent[Stage.INFLATE] += time.monotonic_ns() - spent[Stage.READ] - began_ns
