"""Counts loaded records that do not match the schema. Where they are too many, the schema is wrong.

``on_corrupt="skip_record"`` is for a few bad records. If a shard lacks a feature, it would leave out that shard
record by record. So more than one in a hundred is an error, unless ``on_corrupt="skip_any"``.

Records are counted by window, in the order of the windows, from the window on at which the pass was started, and all
of a window before its first batch is granted. So the result depends on no timing. The share is judged when 10,000
records have been counted, or all of an epoch. With shuffling, a window is a sample of the whole data set, and the
error of a wrong schema comes in place of the first batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from loaderd.daemon.indexing.index_pass import MOST_IN_A_HUNDRED
from loaderd.errors import Damage, LoaderdError, RecordMismatchError
from loaderd.ipc.worker_messages import LoadFault
from loaderd.plan.passes import PassPlan
from loaderd.storage.names import some_of

_ENOUGH_RECORDS = 10_000


class Mismatches:
    """The count of one pass: see the module's docstring. ``error`` is set when there are too many.

    ``per_passing``: how many records there are for each that ``where`` leaves. Those that do not match all pass it,
    so they are judged against the records in front of it.
    """

    def __init__(self, per_passing: float = 1.0) -> None:
        self._per_passing = per_passing
        self.error: LoaderdError | None = None
        self._next_window = self._num_records = 0
        self._by_shard: Counter[str] = Counter()
        self._first: tuple[tuple[str, int], LoaderdError] | None = None

    def count(self, plan: PassPlan, window: int, bad: Iterable[LoadFault]) -> None:
        """Count a window whose rows are all there, unless it was counted. ``bad``: the fault of each bad row."""
        if window < self._next_window:
            return
        self._next_window = window + 1
        self._num_records += plan.order_of(window).num_places
        for fault in bad:
            if isinstance(fault.error, RecordMismatchError):
                self._add(fault.error)
        epoch, _ = plan.batches.locate(window)
        is_epoch = window == plan.last_window or plan.batches.locate(window + 1)[0] != epoch
        if self._num_records < _ENOUGH_RECORDS and not is_epoch:
            return
        most = MOST_IN_A_HUNDRED * self._num_records * self._per_passing
        if 100 * self._by_shard.total() > most and self.error is None:
            self.error = self._too_many()

    def _add(self, error: RecordMismatchError) -> None:
        damage = error.damage or Damage("", 0, -1, "", "")
        self._by_shard[damage.shard] += 1
        place = damage.shard, damage.record
        if self._first is None or place < self._first[0]:  # loads are done in any order
            self._first = place, error

    def _too_many(self) -> LoaderdError:
        assert self._first is not None
        first = self._first[1]
        num_records = round(self._num_records * self._per_passing)
        shards = sorted(self._by_shard.items(), key=lambda item: (-item[1], item[0]))
        which = some_of([f"{count:,} in {shard}" for shard, count in shards])
        return RecordMismatchError(
            f"{self._by_shard.total():,} of {num_records:,} records do not match the schema, and only one in a "
            f"hundred may be left out: {which}. The first: {first.message}",
            hint=f'{first.hint} Or pass on_corrupt="skip_any", to leave out all records that do not match. "loaderd '
            'verify --schema" counts them in each shard.',
            damages=first.damages,
        )
