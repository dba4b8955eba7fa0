"""One who has a stream alone, and what all groups have in common."""

from __future__ import annotations

import pytest

from loaderd.daemon.delivery.events import FailedBatch
from loaderd.daemon.groups.members import PageReader
from loaderd.plan.passes import Pass
from loaderd.shm.page import MAX_GENERATION
from loaderd.shm.page_consumer import PageConsumer
from tests.daemon.group_run import END, STEPS, Run
from tests.daemon.sharing_run import NUM_WORKERS, Workshop


def test_one_alone_gets_all():
    run = Run(1)
    run.start(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_alone_a_generation_may_have_the_number_of_another():
    run = Run(1)
    run.start(1)
    run.work.work(5)
    run.generations[1] = 0
    run.start(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_nothing_is_done_for_one_who_has_left():
    run = Run(1)
    run.start(1)
    run.leave(1)
    assert run.work.is_idle()


def test_what_an_older_start_has_brought_is_lent_until_it_is_given_back():
    run = Run(1)
    run.start(1)
    run.go()
    assert run.got.pop(1) == [0, 1, 2, 3] and run.members.held_by(1) == 4
    run.start(1)
    run.go()
    assert run.got[1] == []
    run.go(1)
    assert run.got[1] == []
    run.release(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_nothing_more_is_made_for_one_who_has_left():
    """But what was begun; else workers would fill all slots with what nobody takes."""
    run = Run(1)
    run.start(1)
    while run.work.fills < 2:
        run.work.work(1)
    run.leave(1)
    run.work.work()
    assert run.work.fills <= 2 + NUM_WORKERS - 1


def test_nobody_gives_back_what_it_does_not_have():
    run = Run(1)
    run.start(1)
    run.work.work()
    with pytest.raises(ValueError, match="is not lent"):
        run.members.release(1, [3])  # it is made, but nobody was told
    run.go()
    slot = run.kept[1][0]
    run.members.release(1, [slot])
    with pytest.raises(ValueError, match=f"slot {slot} is not lent to consumer 1"):
        run.members.release(1, [slot])


def test_a_batch_that_there_is_not_cannot_be_asked_for():
    run = Run(1)
    for step in (-1, STEPS + 1):
        with pytest.raises(ValueError, match="cannot start"):
            run.start(1, step)


def test_one_who_reads_the_page_is_told_only_what_the_page_does_not_say():
    work = Workshop(STEPS, 4, broken=(1,))
    reader = PageReader(work.stream)
    reader.join(7)
    taker = PageConsumer(work.page, work.bell, work.bells)
    taker.begin(3, 0)
    reader.start(7, 3, Pass(0, 1), 0)
    work.work(collects=False)
    (handed,) = reader.take()
    assert (handed.member, handed.generation) == (7, 3) and isinstance(handed.item, FailedBatch)
    assert handed.item.step == 1 and reader.take() == []
    assert reader.held_by(7) == 4 and "has all of the 4" in reader.describe(7)
    got = []
    while taker.step < STEPS:
        if taker.step == 1:
            taker.skip()
        assert taker.has_batch()
        got.append(taker.step)
        taker.release(taker.take()[0])
        work.work(collects=False)
    assert got == [0, 2, 3, 4, 5] and reader.held_by(7) == 0
    with pytest.raises(ValueError, match="in its page"):
        reader.release(7, [0])
    for generation in (3, MAX_GENERATION + 1):
        with pytest.raises(ValueError, match="does not come after generation 3"):
            reader.start(7, generation, Pass(0, 1), 0)
    with pytest.raises(ValueError, match="cannot start"):
        reader.start(7, 4, Pass(0, 1), STEPS + 1)
    reader.leave(7)
    assert reader.describe(7) == "has asked for no batches"
