"""A note of the shards that a server's data sets had when they were listed, for a daemon that takes another's place.

The supervisor keeps it, a file in memory, and gives it to each daemon until it is reloaded. It has a line of JSON for
each data set. The end of the last one may be missing, as a daemon dies at any moment.
"""

from __future__ import annotations

import json
import os

Found = list[list[str] | None]
"""The URIs of the shards of each set; None of one that grows."""


class ShardNote:
    """The note in the file ``fd``, which this object owns from now on. ``shards``: what it says of each data set."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "r+b")
        self._file.seek(0)
        said = self._file.read()
        whole = said[: said.rfind(b"\n") + 1]
        self.shards: dict[str, Found] = dict(map(json.loads, whole.splitlines()))
        self._file.seek(len(whole))
        self._file.truncate()

    def add(self, dataset: str, shards: Found) -> None:
        """Note the shards of a data set."""
        self.shards[dataset] = shards
        self._file.write(json.dumps([dataset, shards]).encode() + b"\n")
        self._file.flush()
