"""Trying again: pauses that grow, and whether to start a process again that has ended."""

from __future__ import annotations

import math
import time

_GOOD_LIFE_S = 60.0


class Backoff:
    """Pauses in seconds: ``first_s``, twice that, and so on up to ``most_s``.

    Each is cut by up to a half at random, so that many who wait for the same thing do not come back in step.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = self._pause_s = first_s
        self._most_s = most_s

    def next_s(self) -> float:
        """The next pause."""
        import random  # few need it

        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._most_s)
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._pause_s = self._first_s


class RestartPolicy:
    """Whether, and when, to start a process again: not after ``most_in_vain`` in a row that have achieved nothing.

    Pauses grow up to ``max_pause_s``; after a process that lived for a minute, they begin anew.
    """

    def __init__(self, most_in_vain: float = math.inf, max_pause_s: float = 5.0) -> None:
        self.num_in_vain = 0
        """How many in a row have achieved nothing."""
        self._most_in_vain = most_in_vain
        self._pauses = Backoff(0.1, max_pause_s)
        self._began_s = time.monotonic()

    def began(self) -> None:
        """A process is started."""
        self._began_s = time.monotonic()

    def achieved(self) -> None:
        """A process does what it is for."""
        self.num_in_vain = 0

    def ended_in_vain(self) -> bool:
        """A process has ended that had achieved nothing; returns whether these are too many in a row."""
        self.num_in_vain += 1
        return self.num_in_vain >= self._most_in_vain

    def pause_s(self) -> float:
        """How long to wait before the next start, now that a process has ended."""
        if time.monotonic() - self._began_s > _GOOD_LIFE_S:
            self._pauses.reset()
        return self._pauses.next_s()
