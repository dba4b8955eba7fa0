"""Loads that storage does not give, or refuses."""

from __future__ import annotations

import pytest
from stream_run import Run

from loaderd.daemon.delivery.away import REST_S
from loaderd.daemon.pool.tasks import LoadWork
from loaderd.errors import StorageError

REFUSED = StorageError("403 Forbidden")


@pytest.mark.parametrize("seeks", [False, True])
def test_a_load_that_is_refused_rests_before_it_is_tried_again(seeks: bool):
    with Run(40, 10, 40) as run:
        load = run.working[0][1]
        run.end_task(load, REFUSED)
        run.end_task(run.working[0][1])
        assert not run.working
        run.stream.tick(REST_S - 1)
        run.hand_out()
        assert not run.working and "does not give 1 loads" in "".join(run.stream.describe())
        if seeks:
            run.start(2, 0)
            run.end_task(run.working[0][1])
            run.end_task(run.working[0][1])
        run.stream.tick(1)
        run.hand_out()
        again = [task.work for _, task in run.working]
        assert [work.slices for work in again if isinstance(work, LoadWork)] == ([] if seeks else [load.work.slices])
        run.to_the_end()
        assert [item.step for item in run.sent] == [0, 1, 2, 3]


def test_only_a_consumer_that_sleeps_for_the_batch_waits_for_it():
    with Run(40, 10, 20) as run:
        run.end_task(run.working[0][1], REFUSED)
        assert not run.stream.is_waited_for, "it computes"
        assert run.take() == [] and run.stream.is_waited_for
        run.floor.consumer.wake_up()
        assert not run.stream.is_waited_for, "it has shown its error"
