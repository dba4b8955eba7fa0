"""A place in the server that is always to be filled by one process, and when another one takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loaderd.server.child import Child

_MAX_STARTS_IN_VAIN = 3
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_GOOD_LIFE_S = 60.0
_ANSWERS_WITHIN_S = 5.0


@dataclass
class Post:
    """``module``: what the process runs. Times are of the monotonic clock, in seconds."""

    name: str
    module: str
    child: Child | None = None
    due_s: float | None = None
    """When another one is to be started; None: there is one, or none is wanted yet."""
    began_s: float = 0.0
    delay_s: float = _FIRST_DELAY_S
    in_vain: int = 0
    restarts: int = 0
    is_renewed: bool = False
    """The process was told to end, for another one to take its place."""

    def missed(self, has_served: bool) -> bool:
        """The process has ended, or was not to be had: plan for another one. False: that was in vain too often."""
        self.child = None
        self.in_vain = 0 if has_served else self.in_vain + 1
        if self.in_vain >= _MAX_STARTS_IN_VAIN:
            return False
        now_s = time.monotonic()
        if now_s - self.began_s > _GOOD_LIFE_S:
            self.delay_s = _FIRST_DELAY_S
        self.restarts += 1
        self.due_s = now_s + self.delay_s
        return True

    def slow_down(self) -> None:
        """The one after the next comes later."""
        self.delay_s = min(2 * self.delay_s, _MAX_DELAY_S)

    def why_not(self) -> str:
        """Why it does not serve now; "" if it does."""
        if self.child is None or self.child.report is None:
            return f"the {self.name} starts"
        if self.child.silent_s > _ANSWERS_WITHIN_S:
            return f"the {self.name} has said nothing for {self.child.silent_s:.0f} s"
        return ""
