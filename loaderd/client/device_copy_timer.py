"""How long a loop waits for copies of its batches to a device.

A device copies after it has done what it was given before, so a loop that waits for a copy may in truth wait for its
model. A copy by itself takes about as long as the fastest one so far. So of each wait, at most that time (for each
record) counts as waiting for the copy; the rest is the model's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from loaderd.client.base import BaseLoader

_Result = TypeVar("_Result")


class DeviceCopyTimer:
    """Counts how long a consumer of ``loader`` waits for copies, of which up to ``ahead`` are begun early.

    To be used where ``BaseLoader.iterate`` calls: one thread at a time.
    """

    def __init__(self, loader: BaseLoader, ahead: int) -> None:
        self._loader = loader
        self._ahead = ahead
        self._fastest_ns = math.inf  # per record
        self.copies_timed = 0
        """Copies whose time was measured."""

    def took(self, copy_ns: int, num_records: int) -> None:
        """Take in that a copy of ``num_records`` records took ``copy_ns``, whether it was waited for or not."""
        self._fastest_ns = min(self._fastest_ns, copy_ns / max(1, num_records))
        self.copies_timed += 1

    def wait(self, num_records: int, result: Callable[[], _Result]) -> _Result:
        """Return what ``result()`` returns, and count its time as a wait for a copy of ``num_records`` records."""
        began_ns = time.perf_counter_ns()
        value = result()
        self.waited(time.perf_counter_ns() - began_ns, num_records)
        return value

    def waited(self, waited_ns: float, num_records: int) -> None:
        """Count that the loop waited ``waited_ns`` for a copy of ``num_records`` records."""
        self._loader.count_device_wait(int(min(waited_ns, self._fastest_ns * num_records)), self._ahead)
