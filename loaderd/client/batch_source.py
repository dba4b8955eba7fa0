"""What a loader asks of the stream that its batches come from."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from loaderd.client.batch import Batch
from loaderd.client.connection import Counts
from loaderd.client.glimpse import Glimpse
from loaderd.errors import LoaderdError
from loaderd.memory.watch import Watched
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing, Pass
from loaderd.plan.positions import Course, Position
from loaderd.schema import Schema


class Described(Protocol):
    """What a stream is of."""

    schema: Schema
    options: StreamOptions
    grows: bool


class Stream(Protocol):
    """One thread at a time, holding ``lock``; but :meth:`close` from any, at any time, without it."""

    lock: threading.Lock
    course: Course
    """The arithmetic for the data in use."""
    counts: Counts
    glimpses: deque[Glimpse]
    """Those that have not seen a batch yet."""

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of ``Statistics``: sizes."""

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""

    @property
    def watched(self) -> Watched | None:
        """The page of the stream; None where there is none."""

    @property
    def is_over(self) -> bool:
        """Whether it gives no batches any more."""

    def course_of(self, of: Pass | Position) -> Course:
        """The arithmetic for the data that a pass or a position is of. Raises LoaderdError."""

    def list_shards(self, listing: Listing | None) -> None:
        """Have the data be made of the shards that there are now, or of those of ``listing``, where sets grow."""

    def fetch(self, pass_: Pass, step: int, wanted: int = 1) -> Batch | LoaderdError | None:
        """Batch ``step`` of a pass, or why it cannot be delivered; None behind the last one."""

    def count_device_wait(self, waited_ns: int, ahead: int) -> None:
        """The consumer has waited so long for a copy to a device, where ``ahead`` of them are begun in advance."""

    def check(self) -> None:
        """Raise ClosedError where it is over."""

    def close(self) -> None:
        """End it; from any thread."""
