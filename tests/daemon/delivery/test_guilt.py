"""How many guilty rows a trial finds before it is hopeless."""

from __future__ import annotations

import pytest

from loaderd.daemon.delivery.poison_records import PoisonSearch
from loaderd.errors import WorkerError
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.batches import Segment


def tried(killing: set[int], stalling: set[int]) -> PoisonSearch:
    """The trial of 64 rows of which workers die or at which they stall, at its end."""
    trial = PoisonSearch(0, BatchRange(5, 6, (Segment(0, 0, 64, 0),)), first_only=False)
    while (work := trial.next_work()) is not None:
        guilty = sorted(killing.union(stalling).intersection(work.rows))
        error = WorkerError(f"row {guilty[0]}") if guilty else None
        trial.tried(work, error, bool(guilty) and guilty[0] in stalling)
    assert trial.finished
    return trial


@pytest.mark.parametrize(
    ("killing", "stalling"), [(range(32), ()), (range(1, 5), (0,)), (range(4), (40,)), ((), (3, 4, 60)), ((), ())]
)
def test_as_many_as_are_left_out(killing: range, stalling: tuple[int, ...]):
    trial = tried({*killing}, {*stalling})
    assert not trial.is_hopeless and set(trial.guilty) == {*killing, *stalling}


@pytest.mark.parametrize(("killing", "stalling"), [(range(64), ()), ((), range(4)), (range(32), (40,))])
def test_one_more_is_too_many(killing: range, stalling: range):
    trial = tried({*killing}, {*stalling})
    assert trial.is_hopeless and len(trial.guilty) == (33 if killing else 4)
    assert (
        trial.too_many().message
        == f"workers are lost at {len(trial.guilty)} records of batch 5 or more; at the first, row 0"
    )
