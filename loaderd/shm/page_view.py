"""A page and the facts of its stream, for processes that only watch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.shm.page import Page
from loaderd.shm.samples import open_page, read_samples, snapshot
from loaderd.snapshots import Facts, Snapshot


class PageView(NamedTuple):
    """Reads only. The memory may be another process's, mapped read-only."""

    page: Page
    facts: Facts

    @classmethod
    def of(cls, memory: npt.NDArray[np.uint8]) -> PageView:
        """Of the page in ``memory``. Raises DaemonError where that is of another version."""
        return cls(*open_page(memory))

    def now(self) -> Snapshot:
        """What has been counted up to now; what only the daemon knows is 0."""
        return snapshot(self.page, self.facts)

    def samples(self) -> list[Snapshot]:
        """What the daemon has counted and measured in the last seconds, one or two samples a second, oldest first."""
        return read_samples(self.page, self.facts)
