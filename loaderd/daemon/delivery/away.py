"""What becomes of loads that storage does not answer: they are tried again, and the consumer is told of it.

A load fails after it has been tried for ``Storage.retry_s`` (of servers: ``reconnect_timeout``). The loads under way
fail one after the other for the same reason: the consumer is told once, and once more when one of them has failed
again. It is told nothing while it has batches to take: by the time it has taken them, storage may be back.
"""

from __future__ import annotations

from loaderd.daemon.pool.tasks import LoadWork
from loaderd.errors import ServerError, StorageError

NotAnswered = StorageError | ServerError


class Away:
    """Pure."""

    def __init__(self) -> None:
        self._error: NotAnswered | None = None
        self._failed: set[LoadWork] = set()

    def failed(self, work: LoadWork, error: NotAnswered) -> None:
        """A load has failed."""
        if not self._failed or work in self._failed:
            self._failed.clear()
            self._error = error
        self._failed.add(work)

    def is_back(self) -> None:
        """A load was done, or none is wanted."""
        self._error = None
        self._failed.clear()

    def take(self) -> NotAnswered | None:
        """What the consumer should be told, once."""
        error, self._error = self._error, None
        return error
