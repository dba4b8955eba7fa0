"""What a gateway counts: for the server's status, its metrics and its log."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

_MOST_CONSUMERS = 256
_OTHERS = "(others)"
_SAY_EVERY_S = 10.0

SOMEWHERE = "somewhere"
"""The host of a call whose origin nobody knows."""

Reader = tuple[str, str]
"""The name that a consumer gives itself, and the host that it calls from."""

_logger = logging.getLogger("loaderd")


class Tally:
    """Counts that only rise. For use from any thread."""

    def __init__(self) -> None:
        self._refused = 0
        self._said_s = 0.0
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self._readers: set[tuple[Reader, str]] = set()
        self._lock = threading.Lock()

    def answered(self, reader: Reader, dataset: str, num_rows: int, num_bytes: int, is_hit: bool) -> None:
        """Rows went to a consumer; ``is_hit``: they were made before. The log says so the first time."""
        with self._lock:
            is_new = (reader, dataset) not in self._readers and len(self._readers) < _MOST_CONSUMERS
            if is_new:
                self._readers.add((reader, dataset))
            key = dataset, reader[0]
            if key not in self._counts and len(self._counts) >= _MOST_CONSUMERS:
                key = dataset, _OTHERS
            counts = self._counts.setdefault(key, Counter())
            counts.update(requests=1, records=num_rows, bytes=num_bytes, cache_hits=int(is_hit))
        if is_new:
            _logger.info("%s (%s) reads %s", *reader, dataset)

    def refused(self, host: str, why: str) -> None:
        """A call was refused; the log says so, at most every 10 s."""
        with self._lock:
            self._refused += 1
            now_s = time.monotonic()
            if now_s - self._said_s < _SAY_EVERY_S:
                return
            self._said_s = now_s
        _logger.warning("a call from %s was refused: %s; %d calls were refused so far", host, why, self._refused)

    def report(self) -> dict[str, Any]:
        """All counts, as plain values."""
        with self._lock:
            remote = [
                {"dataset": dataset, "consumer": consumer, **counts}
                for (dataset, consumer), counts in self._counts.items()
            ]
            return {"remote": remote, "refused": self._refused}
