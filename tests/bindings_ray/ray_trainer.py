"""A trainer on a cluster, as an actor: it takes batches, and can be asked meanwhile how many."""

from __future__ import annotations

import math
import time
from typing import Any

import loaderd_ray

_STEP_S = 0.02


class Trainer:
    """Of data set "train" of the servers called ``name``; to be made with max_concurrency=2."""

    def __init__(self, name: str, **options: Any) -> None:
        self._loader = loaderd_ray.connect(name, batch_size=64, workers=1, **options)
        self._found: list[list[int]] = []
        self._end = math.inf

    def read(self) -> list[list[int]]:
        """The ids of all batches, up to where :meth:`end_after` says."""
        with self._loader:
            for batch in self._loader:
                self._found.append(batch["id"].tolist())
                if len(self._found) >= self._end:
                    break
                time.sleep(_STEP_S)
        return self._found

    def num_taken(self) -> int:
        return len(self._found)

    def end_after(self, count: int) -> None:
        """Take so many batches more."""
        self._end = len(self._found) + count
