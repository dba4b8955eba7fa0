"""The plan of one pass: what its windows are made of and what its batches are cut from.

Joins the order of each epoch (:mod:`loaderd.plan.epoch`) with the batches (:mod:`loaderd.plan.batches`). Everything
here is a function of the constructor's arguments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from loaderd.plan.batches import BatchPlan, Segment
from loaderd.plan.epoch import EpochOrder, Slice, WindowOrder

Int64s = npt.NDArray[np.int64]


class PassPlan:
    """The windows and the batches of the pass that begins at ``first_epoch``."""

    def __init__(self, counts: Int64s, batches: BatchPlan, seed: int, shuffle: bool, first_epoch: int) -> None:
        """``counts``: int64, (blocks,): records of each block."""
        self.batches = batches
        self.first_epoch = first_epoch
        self.num_steps = batches.num_steps
        """Batches of the pass; None if it never ends."""
        self._seed = seed
        self._shuffle = shuffle
        # Windows are opened in order, so one epoch and the next are all that is ever asked for.
        self._epoch_order = lru_cache(maxsize=2)(lambda epoch: EpochOrder(counts, seed, epoch, shuffle))
        # A batch is asked for when it is considered and when it is begun, and so are its neighbours.
        self._segments_of = lru_cache(maxsize=16)(batches.segments)

    def _locate(self, window: int) -> tuple[int, int, int]:
        """(epoch, first row in it, number of rows) of a window."""
        share = self.batches.share
        epoch, index = divmod(window, share.num_windows)
        return self.first_epoch + epoch, share.epoch_row_of(index), share.size_of(index)

    def size_of(self, window: int) -> int:
        """Rows of ``window``."""
        return self._locate(window)[2]

    def slices_of(self, window: int) -> list[Slice]:
        """The records that make up ``window``, in order of row."""
        epoch, start, size = self._locate(window)
        return self._epoch_order(epoch).slices(start, start + size)

    def order_of(self, window: int) -> WindowOrder:
        """Where the rows of ``window`` go."""
        epoch, start, size = self._locate(window)
        return WindowOrder.of(self._seed, epoch, start, size, self._shuffle)

    def segments_of(self, step: int) -> list[Segment]:
        """Where the rows of batch ``step`` lie."""
        return self._segments_of(step)

    def last_step_in(self, window: int) -> int:
        """The last batch that reads from ``window`` or from one before it."""
        return self.batches.last_step_in(window)
