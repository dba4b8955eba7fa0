"""A look at records that pass by: for pictures of what a training sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.client.batch import Batch


class Glimpse:
    """Of the next batch that somebody takes, a copy of the first records: no slot is held, and no batch is taken."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self.fields: dict[str, npt.NDArray[np.generic]] | None = None
        """By name, (records, …): ``num_records``, or as many as the batch has. None: no batch was taken yet."""

    def see(self, batch: Batch) -> None:
        """This batch is taken."""
        self.fields = {name: array[: self._num_records].copy() for name, array in batch.items()}
