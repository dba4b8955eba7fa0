"""How long a loop waits for copies of its batches to a device.

A device copies after it has done what it was given before, so a loop that waits for a copy may in truth wait for its
model. A copy by itself takes about as long as the fastest one so far. So of each wait, that much (for each record)
counts as waiting for the copy; the rest is the model's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from loaderd.client.base import BaseLoader

_Result = TypeVar("_Result")


class CopyWaits:
    """Of one consumer of ``loader``, of whose batches ``ahead`` are copied before they are taken.

    To be used where ``BaseLoader.iterate`` calls: one thread at a time.
    """

    def __init__(self, loader: BaseLoader, ahead: int) -> None:
        self._loader = loader
        self._ahead = ahead
        self._fastest_ns = math.inf  # a record
        self.copies_timed = 0
        """Copies of which it is known how long they took."""

    def took(self, copy_ns: int, num_records: int) -> None:
        """A copy of so many records took so long, whether it was waited for or not."""
        self._fastest_ns = min(self._fastest_ns, copy_ns / max(1, num_records))
        self.copies_timed += 1

    def wait(self, num_records: int, result: Callable[[], _Result]) -> _Result:
        """What ``result()`` returns, the copy of so many records, for which the loop waits now."""
        began_ns = time.perf_counter_ns()
        found = result()
        self.waited(time.perf_counter_ns() - began_ns, num_records)
        return found

    def waited(self, waited_ns: float, num_records: int) -> None:
        """The loop has waited so long for a copy of so many records."""
        self._loader.count_device_wait(int(min(waited_ns, self._fastest_ns * num_records)), self._ahead)
