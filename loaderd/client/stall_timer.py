"""How long to wait for a process that says nothing. Pure: it counts waits in which nothing came, and reads no clock.

So time in which nobody waits does not count: while the whole job is stopped, or a laptop sleeps, or the clock is set.
"""

from __future__ import annotations

import math

_TICK_S = 1.0
_ASK_AFTER_S = 30.0
_REPORT_AFTER_S = 30.0


class StallTimer:
    """For one wait. ``stall_timeout``: seconds of silence after which it is over; None: never.

    ``limit_s`` is the same (None: inf), and ``tick_s`` how long to wait at a time, in seconds.
    """

    def __init__(self, stall_timeout: float | None) -> None:
        self.limit_s = math.inf if stall_timeout is None else stall_timeout
        self._ask_after_s = min(_ASK_AFTER_S, self.limit_s / 2)
        self.tick_s = min(_TICK_S, self._ask_after_s)
        self._silent_s = self._unasked_s = self.waited_s = 0.0
        self._report_after_s = _REPORT_AFTER_S

    def tick(self) -> None:
        """Nothing came for ``tick_s``."""
        self._silent_s += self.tick_s
        self._unasked_s += self.tick_s
        self.waited_s += self.tick_s

    def heard(self) -> None:
        """Something came, so the other process is alive."""
        self._silent_s = self._unasked_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._silent_s >= self.limit_s

    def must_ask(self) -> bool:
        """Whether it is time to ask for a sign of life."""
        due = self._unasked_s >= self._ask_after_s
        if due:
            self._unasked_s = 0.0
        return due

    def must_report(self) -> bool:
        """Whether the wait has become so long that the user should hear why: after 30 s, 60 s, 120 s and so on."""
        due = self.waited_s >= self._report_after_s
        while self.waited_s >= self._report_after_s:
            self._report_after_s *= 2
        return due
