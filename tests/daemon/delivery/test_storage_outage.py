"""Loads that storage does not give, or refuses."""

from __future__ import annotations

import pytest

from loaderd.daemon.delivery.storage_outage import REST_S
from loaderd.errors import StorageError
from loaderd.ipc.worker_messages import LoadTask
from loaderd.shm.page import CONSUMER_SLEEPS_FOR, key_of
from loaderd.snapshots import Outage
from tests.daemon.stream_run import Run

REFUSED = StorageError("403 Forbidden")
SILENT = Outage(7.0, 3, "503")


@pytest.mark.parametrize("seeks", [False, True])
def test_a_load_that_is_refused_rests_before_it_is_tried_again(seeks: bool):
    run = Run(40, 10, 40)
    load = run.end_task(REFUSED)
    run.load_all()
    run.stream.tick(REST_S - 1)
    run.hand_out()
    assert not run.queue
    if seeks:
        run.start(2, 0)
        run.load_all()
    run.stream.tick(1)
    run.hand_out()
    again = [task.work.slices for task in run.queue if isinstance(task.work, LoadTask)]
    assert isinstance(load.work, LoadTask) and again == ([] if seeks else [load.work.slices])
    assert [item.step for item in run.to_the_end()] == [0, 1, 2, 3]


def test_only_a_consumer_that_sleeps_for_the_batch_waits_for_it():
    run = Run(40, 10, 20)
    run.end_task(REFUSED)
    assert not run.stream.is_waited_for, "it computes"
    run.page.words[CONSUMER_SLEEPS_FOR] = key_of(1, 0)
    assert run.stream.is_waited_for


def test_an_outage_is_what_the_loads_under_way_wait_for():
    run = Run(40, 10, 20)
    stream = run.stream
    stream.tick(20)
    stream.storage.report(0, SILENT)
    stream.storage.report(1, Outage(9.0, 4, "504"))
    assert stream.outage == Outage(9.0, 7, "504")
    said = "no answer from the storage for 9 s; 7 requests failed, the last one: 504"
    assert said in "".join(stream.describe())
    run.end_task()
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
    run = Run(80, 10, 20)
    run.load_all()
    run.stream.tick(100)
    run.stream.storage.report(0, SILENT)
    assert run.stream.outage is None, "nothing is loaded"
    run.come_to(2)
    run.stream.look()
    run.hand_out()
    assert run.queue and run.stream.outage == SILENT._replace(for_s=0.0)


def test_a_load_that_fails_is_an_outage_without_a_report():
    run = Run(40, 10, 40)
    stream = run.stream
    stream.tick(6)
    assert stream.outage is None
    run.end_task(REFUSED)
    stream.tick(3)
    assert stream.outage == Outage(9.0, 1, "403 Forbidden")
    stream.tick(3)
    run.hand_out()
    assert stream.outage == Outage(12.0, 1, "403 Forbidden"), "while it is tried again, too"
    run.to_the_end()
    assert stream.outage is None
