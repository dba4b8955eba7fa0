"""A post: the role of daemon or gateway, which one process has at a time; and when to start the next process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from loaderd.restarts import RestartPolicy
from loaderd.server.child import Child

_MAX_STARTS_IN_VAIN = 3
_ANSWERS_WITHIN_S = 5.0


@dataclass
class Post:
    """``module``: what the process runs. Times are in seconds of the monotonic clock."""

    name: str
    module: str
    child: Child | None = None
    due_s: float | None = None
    """When to start the next process; None: one runs, or none is needed yet."""
    policy: RestartPolicy = field(default_factory=lambda: RestartPolicy(_MAX_STARTS_IN_VAIN))
    restarts: int = 0
    has_ever_served: bool = False
    """Whether any of its processes has."""
    is_renewed: bool = False
    """Whether the process was told to end because another one is to replace it."""

    def missed(self, has_served: bool) -> float | None:
        """Plan the next process, as one has ended or did not start; returns in how many seconds it starts.

        None: too many in a row have never served.
        """
        self.child = None
        if has_served:
            self.policy.achieved()
        elif self.policy.ended_in_vain():
            return None
        self.restarts += 1
        pause_s = self.policy.pause_s()
        self.due_s = time.monotonic() + pause_s
        return pause_s

    def why_not(self) -> str:
        """Why it cannot serve now; "" if it can."""
        if self.child is None or self.child.report is None:
            return f"the {self.name} is starting"
        if self.child.silent_s > _ANSWERS_WITHIN_S:
            return f"the {self.name} has said nothing for {self.child.silent_s:.0f} s"
        return ""
