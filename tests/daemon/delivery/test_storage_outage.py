"""Loads that storage does not give, or refuses."""

from __future__ import annotations

import pytest

from loaderd.daemon.delivery.storage_outage import REST_S
from loaderd.errors import StorageError
from loaderd.ipc.worker_messages import LoadTask
from loaderd.snapshots import Outage
from tests.daemon.stream_run import Run

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
        assert [work.slices for work in again if isinstance(work, LoadTask)] == ([] if seeks else [load.work.slices])
        run.to_the_end()
        assert [item.step for item in run.sent] == [0, 1, 2, 3]


def test_only_a_consumer_that_sleeps_for_the_batch_waits_for_it():
    with Run(40, 10, 20) as run:
        run.end_task(run.working[0][1], REFUSED)
        assert not run.stream.is_waited_for, "it computes"
        assert run.take() == [] and run.stream.is_waited_for
        run.floor.consumer.wake_up()
        assert not run.stream.is_waited_for, "it has shown its error"


SILENT = Outage(7.0, 3, "503")


def test_an_outage_is_what_the_loads_under_way_wait_for():
    with Run(40, 10, 20, workers=2) as run:
        stream, load = run.stream, run.working[0][1]
        stream.tick(20)
        stream.storage.report(0, SILENT)
        stream.storage.report(1, Outage(9.0, 4, "504"))
        assert stream.outage == Outage(9.0, 7, "504")
        assert "no answer from the storage for 9 s; 7 requests failed, the last one: 504" in "".join(
            stream.describe()
        )
        run.end_task(load)
        assert stream.outage is None, "storage answers one of the two"
        stream.tick(3)
        stream.storage.report(1, SILENT)
        assert stream.outage == Outage(3.0, 3, "503"), "it has answered since"
        stream.storage.report(1, None)
        assert stream.outage is None
        stream.storage.report(1, SILENT)
        stream.stop()
        assert stream.outage is None, "nothing is wanted of it"


def test_a_worker_that_was_not_answered_last_time_makes_no_outage_of_the_next_load():
    with Run(80, 10, 20) as run:
        while run.working:
            run.end_task(run.working[0][1])
        run.stream.tick(100)
        run.stream.storage.report(0, SILENT)
        assert run.stream.outage is None, "nothing is loaded"
        while not run.working:
            run.claims(0)
            run.floor.hands[0].made()
            for slot in run.take():
                run.floor.consumer.taker.release(slot)
        assert run.stream.outage == SILENT._replace(for_s=0.0)


def test_a_load_that_fails_or_does_not_return_is_an_outage_without_a_report():
    with Run(40, 10, 40) as run:
        stream = run.stream
        stream.tick(6)
        stream.storage.read_hangs(0, 4.0)
        assert stream.outage == Outage(4.0, 0, "")
        assert stream.outage.in_words("the servers") == "no answer from the servers for 4 s"
        stream.storage.read_hangs(0, 0.0)
        assert stream.outage is None
        run.end_task(run.working[0][1], REFUSED)
        stream.tick(3)
        assert stream.outage == Outage(9.0, 1, "403 Forbidden")
        stream.tick(3)
        run.hand_out()
        assert stream.outage == Outage(12.0, 1, "403 Forbidden"), "while it is tried again, too"
        run.to_the_end()
        assert stream.outage is None
