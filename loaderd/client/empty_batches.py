"""The batches of which ``on_corrupt`` left no record, as far as the consumer has come: iterators pass over them.

So a consumer that counts the batches that it got counts fewer than there are steps. :meth:`EmptyBatches.between` says
how many it did not get.
"""

from __future__ import annotations

_MOST_KEPT = 1_000_000

Place = tuple[int, int]
"""(first epoch of the pass, step)."""


class EmptyBatches:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        self.in_a_row = 0

    def add(self, place: Place) -> None:
        """The batch at ``place`` is empty."""
        self._places[place] = None
        self.in_a_row += 1
        if len(self._places) > _MOST_KEPT:
            del self._places[next(iter(self._places))]

    def delivered(self, place: Place) -> None:
        """The batch at ``place`` has records; it may have been empty before its shard was mended."""
        self.in_a_row = 0
        if self._places:
            self._places.pop(place, None)

    def between(self, begin: Place, last: Place) -> int:
        """How many there are from ``begin`` to ``last``, both included."""
        return sum(begin <= place <= last for place in list(self._places))
