"""How fast a process may send: so many bytes a second; those of one second may go at once."""

from __future__ import annotations

import asyncio
import time

from loaderd.serve.datasets import NotReady

_MOST_WAIT_S = 5.0


class Bandwidth:
    """Answers wait here before they are made, so they take no memory. For use in one event loop."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._next_s = 0.0
        """When the next answer may go: it is in the past while bytes are left over."""

    async def wait(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be sent. Raises NotReady if that takes long."""
        now_s = time.monotonic()
        begin_s = max(self._next_s, now_s - 1.0)
        if begin_s > now_s + _MOST_WAIT_S:
            raise NotReady("the bandwidth is used up")
        self._next_s = begin_s + num_bytes / self._bytes_per_s
        try:
            await asyncio.sleep(max(0.0, begin_s - now_s))
        except asyncio.CancelledError:  # the caller has gone
            self._next_s -= num_bytes / self._bytes_per_s
            raise
