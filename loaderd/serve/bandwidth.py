"""How fast a process may send: so many bytes a second; those of one second may go at once."""

from __future__ import annotations


class Bandwidth:
    """A token bucket. ``now_s``: the time of any clock, in seconds."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_bytes = bytes_per_s
        self._at_s: float | None = None

    def _refill(self, now_s: float) -> None:
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._free_bytes = min(self._bytes_per_s, self._free_bytes + passed_s * self._bytes_per_s)

    def wait_s(self, now_s: float) -> float:
        """How long to wait before more may be sent; 0: now."""
        self._refill(now_s)
        return max(0.0, -self._free_bytes / self._bytes_per_s)

    def used(self, num_bytes: int, now_s: float) -> None:
        """``num_bytes`` were sent. If fewer were free, the next call has to wait."""
        self._refill(now_s)
        self._free_bytes -= num_bytes
