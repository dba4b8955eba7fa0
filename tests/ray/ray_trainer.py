"""A trainer on a cluster, as an actor: it takes batches, and can be asked meanwhile how many."""

from __future__ import annotations

import time
from typing import Any

import loaderd_ray


class Trainer:
    """Of data set "train" of the servers called ``name``; to be made with max_concurrency=2."""

    def __init__(self, name: str, **options: Any) -> None:
        self._loader = loaderd_ray.connect(name, batch_size=64, workers=1, **options)
        self._found: list[list[int]] = []

    def read(self, pause_s: float = 0.0) -> list[list[int]]:
        """The ids of all batches; ``pause_s``: what a step takes."""
        with self._loader:
            for batch in self._loader:
                self._found.append(batch["id"].tolist())
                time.sleep(pause_s)
        return self._found

    def read_until(self, limit_s: float) -> list[list[int]]:
        """The ids of the batches of so many seconds."""
        until_s = time.monotonic() + limit_s
        with self._loader:
            for batch in self._loader:
                self._found.append(batch["id"].tolist())
                if time.monotonic() > until_s:
                    break
                time.sleep(0.02)
        return self._found

    def num_taken(self) -> int:
        return len(self._found)
