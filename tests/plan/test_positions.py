"""Going on from a position, at every step, on as many hosts as before or on others: nothing is lost or repeated."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loaderd.errors import OptionError
from loaderd.options import Remainder, StreamOptions
from loaderd.plan.passes import Pass, PassPlan, pass_of, past_of
from loaderd.plan.positions import PassSequence, Position, order_of
from loaderd.plan.rows import DatasetRows

Row = tuple[int, int, int]
"""(epoch, block, record of the block)."""


@dataclass(frozen=True)
class Job:
    """A training on ``hosts`` hosts, as arithmetic: what each host would get."""

    counts: tuple[int, ...]
    hosts: int
    window_records: int
    options: StreamOptions

    def pass_sequence(self, host: int) -> PassSequence:
        options = replace(self.options, shard=(host, self.hosts))
        return PassSequence(options, sum(self.counts), self.window_records, {"seed": 0})

    def plan(self, pass_: Pass, host: int) -> PassPlan:
        rows = DatasetRows(np.array(self.counts), 5, bool(self.options.shuffle))
        return PassPlan(
            rows, self.pass_sequence(host).batches(pass_), 5, bool(self.options.shuffle), pass_.first_epoch
        )

    def batch(self, plan: PassPlan, pass_: Pass, step: int) -> list[Row]:
        found: list[Row] = []
        for segment in plan.segments_of(step):
            order = plan.order_of(segment.window)
            by_place: dict[int, Row] = {}
            for part in plan.slices_of(segment.window):
                places = order.places(part.row, part.row + part.stop - part.first).tolist()
                for number, place in enumerate(places):
                    if place >= 0:
                        assert place not in by_place
                        by_place[place] = (part.epoch, part.block, part.first + number)
            assert sorted(by_place) == list(range(order.num_places))
            found += [by_place[place] for place in range(segment.start, segment.stop)]
        return found


jobs = st.builds(
    lambda counts, hosts, window, batch, remainder, epochs, shuffle: Job(
        tuple(counts),
        hosts,
        window,
        StreamOptions(min(batch, sum(counts) // hosts), epochs, shuffle, remainder=remainder),
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda counts: sum(counts) >= 4),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from(get_args(Remainder)),
    st.integers(1, 3),
    st.booleans(),
)


@given(job=jobs)
def test_every_position_of_a_pass_leads_back_to_its_batch(job: Job):
    for host in range(job.hosts):
        pass_sequence = job.pass_sequence(host)
        pass_: Pass | None = Pass(0, job.options.epochs)
        for _ in range(2):
            assert pass_ is not None
            num_steps = pass_sequence.batches(pass_).num_steps
            assert num_steps is not None
            plan = job.plan(pass_, host)
            for step in range(num_steps):
                position = pass_sequence.position(pass_, step)
                again = Position.from_json(position.to_json())
                assert again == position
                found, at = pass_sequence.find(again)
                assert job.batch(job.plan(found, host), found, at) == job.batch(plan, pass_, step)
                left = pass_sequence.batches(found).num_steps
                assert left is not None and left - at == num_steps - step
                assert pass_sequence.after(Position(), course_steps(pass_sequence, pass_) + step) == position
            assert pass_sequence.find(pass_sequence.position(pass_, num_steps)) == (pass_sequence.next_pass(pass_), 0)
            pass_ = pass_sequence.next_pass(pass_)


# A pass that is to end, or not: the second host has one row less, and splits its only batch; a batch over an end.
@example(job=Job((5,), 2, 1, StreamOptions(2, 1, False, remainder="carry")), epochs=None, step=1)
@example(job=Job((5,), 2, 1, StreamOptions(2, 2, False, remainder="carry")), epochs=1, step=1)
@example(job=Job((4,), 1, 1, StreamOptions(3, 2, False, remainder="carry")), epochs=1, step=2)
@given(job=jobs, epochs=st.none() | st.integers(1, 5), step=st.integers(0, 40))
def test_a_training_that_goes_on_for_longer_gets_what_is_left(job: Job, epochs: int | None, step: int):
    """Also of batches that go on over the ends of epochs: the last one of a pass is short, and so begins the next."""
    longer = replace(job, options=replace(job.options, epochs=epochs))
    got: Counter[Row] = Counter()
    reached: list[int] = []
    for host in range(job.hosts):
        pass_sequence, then = job.pass_sequence(host), longer.pass_sequence(host)
        pass_ = Pass(0, job.options.epochs)
        num_steps = pass_sequence.batches(pass_).num_steps
        assert num_steps is not None
        at = min(step, num_steps)
        try:
            found, begin = then.find(pass_sequence.position(pass_, at))
        except OptionError:
            assert epochs is not None and at < num_steps, "of fewer epochs there may be no such batch"
            return
        end = then.batches(found).num_steps
        taken = [job.batch(job.plan(pass_, host), pass_, number) for number in range(at)]
        plan, stop = longer.plan(found, host), begin + 40
        rest = [longer.batch(plan, found, number) for number in range(begin, stop if end is None else min(stop, end))]
        got.update(row for batch in taken + rest for row in batch)
        goes_on = end is None or stop < end
        reached.append(max((row[0] for batch in taken + rest for row in batch), default=0) + (not goes_on))
    assert not got or max(got.values()) == 1
    if job.options.remainder != "drop":
        records = [(block, number) for block, count in enumerate(job.counts) for number in range(count)]
        complete = [(epoch, *record) for epoch in range(min(reached)) for record in records]
        assert all(got[row] == 1 for row in complete), "not a record is left out"


@given(
    job=jobs,
    epochs=st.none() | st.integers(1, 3),
    hosts=st.integers(1, 4),
    steps=st.tuples(*[st.integers(0, 30)] * 3),
)
def test_batches_later_is_where_taking_them_leads(
    job: Job, epochs: int | None, hosts: int, steps: tuple[int, int, int]
):
    """In a pass that ends or not, also from where other hosts left off."""
    job = replace(job, options=replace(job.options, epochs=epochs))
    others = replace(job, hosts=min(hosts, sum(job.counts) // job.options.batch_size))
    sequence, (before, step, more) = job.pass_sequence(0), steps
    for begin in (Position(), others.pass_sequence(0).after(Position(), before)):
        pass_, first = sequence.find(begin)
        there = sequence.after(begin, step)
        assert sequence.after(begin, step + more) == sequence.after(there, more)
        num_steps = sequence.batches(pass_).num_steps
        if num_steps is None or first + step < num_steps:
            assert there == sequence.position(pass_, first + step)
            found, at = sequence.find(there)
            assert job.batch(job.plan(found, 0), found, at) == job.batch(job.plan(pass_, 0), pass_, first + step)


@pytest.mark.parametrize("epochs", [2, None])
def test_a_whole_pass_has_all_of_its_epochs_from_the_first_batch_on(epochs: int | None):
    sequence = Job((9,), 1, 5, StreamOptions(3, epochs)).pass_sequence(0)
    pass_ = Pass(0, epochs)
    assert sequence.is_whole(pass_, 0) and sequence.is_whole(sequence.next_pass(pass_), 0)
    assert not sequence.is_whole(pass_, 1)
    assert not sequence.is_whole(Pass(1, 1), 0)
    assert not sequence.is_whole(pass_._replace(past=((2, 1, 3),)), 0)


def course_steps(pass_sequence: PassSequence, pass_: Pass) -> int:
    """Batches of all passes in front of this one."""
    before, steps = Pass(0, pass_.epochs), 0
    while before != pass_:
        steps += pass_sequence.batches(before).num_steps or 0
        before = pass_sequence.next_pass(before)
    return steps


@given(job=jobs)
def test_all_hosts_have_as_many_batches_and_each_row_is_in_one(job: Job):
    pass_ = Pass(0, job.options.epochs)
    plans = [job.plan(pass_, host) for host in range(job.hosts)]
    (num_steps,) = {plan.num_steps for plan in plans}
    assert num_steps is not None
    rows: Counter[Row] = Counter()
    for plan in plans:
        assert [plan.batches.place_of(step) for step in range(num_steps)] == [
            plans[0].batches.place_of(step) for step in range(num_steps)
        ], "a position is the same on all hosts"
        sizes = []
        for step in range(num_steps):
            batch = job.batch(plan, pass_, step)
            rows.update(batch)
            sizes.append(len(batch))
            windows = [segment.window for segment in plan.segments_of(step)]
            assert len(set(windows)) <= plan.batches.max_windows_of_a_batch
            assert all(plan.last_step_in(window) >= step for window in windows)
        if job.options.batch_size > 1:
            assert all(sizes)
        if job.options.remainder == "drop":
            assert set(sizes) <= {job.options.batch_size}
    if job.options.remainder == "drop":
        assert set(rows.values()) <= {1}
        lost = sum(job.counts) - job.hosts * plans[0].batches.steps_per_epoch * job.options.batch_size
        assert sum(rows.values()) == job.options.epochs * (sum(job.counts) - lost)
        assert lost < job.hosts * job.options.batch_size + job.hosts
    else:
        assert rows == {
            (epoch, block, number): 1
            for epoch in range(job.options.epochs or 0)
            for block, count in enumerate(job.counts)
            for number in range(count)
        }


@given(job=jobs, changes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=4), data=st.data())
def test_hosts_that_come_and_go_lose_nothing_and_repeat_nothing(
    job: Job, changes: list[tuple[int, int]], data: st.DataObject
):
    """Stop anywhere, go on with other hosts and another batch size, again and again, to the end of the pass."""
    position = Position(of={"seed": 0})
    rows: Counter[Row] = Counter()
    most_lost = 0
    for hosts, batch_size in [*changes, (job.hosts, job.options.batch_size), (0, 0)]:
        found = [job.pass_sequence(host).find(position) for host in range(job.hosts)]
        assert len(set(found)) == 1
        pass_, step = found[0]
        if pass_.first_epoch >= (job.options.epochs or 0):
            break  # the position is behind the last batch
        plans = [job.plan(pass_, host) for host in range(job.hosts)]
        (num_steps,) = {plan.num_steps for plan in plans}
        assert num_steps is not None
        stop = data.draw(st.integers(step, num_steps)) if hosts else num_steps
        most_lost += job.hosts * job.options.batch_size + job.hosts
        for plan in plans:
            for number in range(step, stop):
                batch = job.batch(plan, pass_, number)
                rows.update(batch)
                assert len({s.window for s in plan.segments_of(number)}) <= plan.batches.max_windows_of_a_batch
        positions = {job.pass_sequence(host).position(pass_, stop).to_json() for host in range(job.hosts)}
        (text,) = positions
        position = Position.from_json(text)
        if hosts:
            smaller = max(1, min(batch_size, sum(job.counts) // hosts))
            if job.options.remainder == "short":
                smaller = batch_size
            job = replace(job, hosts=hosts, options=replace(job.options, batch_size=smaller))
            if sum(job.counts) < hosts:
                return
    every = {
        (epoch, block, number)
        for epoch in range(job.options.epochs or 0)
        for block, count in enumerate(job.counts)
        for number in range(count)
    }
    assert set(rows.values()) <= {1}, "twice"
    if job.options.remainder == "drop":
        assert len(every - set(rows)) <= most_lost * (job.options.epochs or 0)
    else:
        assert set(rows) == every


def test_a_position_of_other_data_is_refused_with_what_differs():
    pass_sequence = Job((700, 300), 1, 100, StreamOptions(10, 3)).pass_sequence(0)
    position = replace(pass_sequence.position(Pass(0, 3), 57), of={"seed": 1, "features": "ab"})
    with pytest.raises(
        OptionError, match=r"seed: 1 when the position was taken, 0 now\n  features: ab .*nothing now"
    ):
        pass_sequence.find(position)
    assert pass_sequence.find(replace(position, of={})) == (Pass(0, 3), 57 + 50 - 50)


@pytest.mark.parametrize("of", [{"seed": "9" * 10_000_000}, {str(number): 0 for number in range(100_000)}])
def test_the_error_of_a_huge_position_is_short(of: dict[str, Any]):
    """Its text would be searched for secrets, at a second for 2 MB."""
    pass_sequence = Job((700, 300), 1, 100, StreamOptions(10, 3)).pass_sequence(0)
    with pytest.raises(OptionError, match="other data") as raised:
        pass_sequence.find(Position(0, 0, of=of))
    assert len(str(raised.value)) < 5000


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Position(1, 100), "there is no batch 100 in epoch 1"),
        (Position(0, 50, batch_size=20), "there is no batch 50 in epoch 0"),
    ],
)
def test_a_position_that_does_not_exist(position: Position, message: str):
    pass_sequence = Job((700, 300), 1, 100, StreamOptions(10, 3)).pass_sequence(0)
    with pytest.raises(OptionError, match=message):
        pass_sequence.find(position)


def test_a_pass_that_came_as_lists_is_the_one_that_was_sent():
    pass_ = Pass(2, None, ((3, 4), (5,)), (None, ("a", "b", 3, "digest")))
    assert pass_of([2, None, [[3, 4], [5]], [None, ["a", "b", 3, "digest"]]]) == pass_


# A consumer on another machine may say anything.
WILD = [0, 1, 2, 3, 7, 20, 500, 2**31, 2**62, 2**63 - 1, -1, -(2**63), None, True, 0.5, "1", [], {}]
wild = st.sampled_from(WILD) | st.integers(0, 30)
wild_past = st.lists(st.lists(wild, max_size=5), max_size=4) | wild
wild_listing = st.none() | st.lists(st.none() | st.lists(wild, min_size=4, max_size=4)) | wild


def plan_of(job: Job, pass_: Pass, step: int) -> None:
    """Everything that is asked of a plan when a pass begins at ``step``."""
    plan = job.plan(pass_, 0)
    assert plan.batches.max_windows_of_a_batch >= 1
    if plan.num_steps is None or step < plan.num_steps:
        window = plan.first_window_from(step)
        assert plan.last_window is None or window <= plan.last_window
        assert plan.order_of(window).num_places <= plan.batches.largest_window <= job.window_records + 1
        assert plan.rows_of(window) <= job.window_records + 1
        assert plan.last_step_in(window) >= step
        plan.slices_of(window), plan.segments_of(step)


@given(
    job=jobs, wire=st.tuples(wild, wild, wild_past, wild_listing).map(list) | wild, step=st.sampled_from(WILD[:12])
)
def test_a_pass_of_any_values_can_be_planned_or_is_refused(job: Job, wire: Any, step: int):
    try:
        pass_ = pass_of(wire)
        num_steps = job.pass_sequence(0).batches(pass_).num_steps
    except OptionError:
        return
    if step >= 0 and (num_steps is None or step <= num_steps):
        plan_of(job, pass_, step)


@given(
    job=jobs,
    changes=st.fixed_dictionaries(
        {},
        optional={
            "version": wild,
            "epoch": wild,
            "batch": wild,
            "hosts": wild,
            "batch_size": wild,
            "first_epoch": wild,
            "past": wild_past,
            "listing": wild_listing,
            "of": wild,
            "more": wild,
        },
    ),
)
def test_a_position_of_any_values_can_be_planned_or_is_refused(job: Job, changes: dict[str, Any]):
    text = json.dumps({**json.loads(Position(0, 1).to_json()), **changes})
    try:
        pass_, step = job.pass_sequence(0).find(Position.from_json(text))
    except OptionError:
        return
    plan_of(job, pass_, step)
    num_steps = job.pass_sequence(0).batches(pass_).num_steps
    assert num_steps is None or step <= num_steps


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "null", "[1]", "{}", '{"version": 1}', '{"version": 2}', "1" * 5000]
)
def test_text_that_is_no_position(text: str):
    with pytest.raises(OptionError, match=r"must be what Position.to_json\(\) wrote") as refused:
        Position.from_json(text)
    assert len(str(refused.value)) < 500


def test_a_past_that_would_take_long_to_plan_is_refused():
    assert past_of([[0] * 256] * 16)
    with pytest.raises(OptionError, match=r"too many changes of hosts: .* 1,048,576, got 1,114,112"):
        past_of([[0] * 256] * 17)
    pass_sequence = Job((1_000_000,), 1, 100_000, StreamOptions(10, 3)).pass_sequence(0)
    assert len(pass_sequence.find(Position(0, 1, hosts=512, batch_size=1))[0].past[0]) == 512
    with pytest.raises(OptionError, match=r"too many changes of hosts: .* 1,048,576, got 10,000,000,000"):
        pass_sequence.find(Position(0, 1, hosts=100_000, batch_size=1))
    with pytest.raises(OptionError, match="too many changes of hosts"):
        pass_sequence.find(Position(0, 1, hosts=1000, batch_size=1, past=((0,) * 500,)))


def test_hosts_cannot_have_taken_all_of_an_epoch():
    """Else the position would be at the end of the epoch."""
    pass_sequence = Job((100,), 2, 100, StreamOptions(10, 3)).pass_sequence(0)
    assert pass_sequence.find(Position(0, 0, past=((30, 30),)))[0].past == ((30, 30),)
    with pytest.raises(OptionError, match="2 hosts cannot have taken"):
        pass_sequence.find(Position(0, 0, past=((50, 50),)))


def test_a_position_says_whether_its_order_was_shuffled():
    assert order_of(StreamOptions(10, 3, shuffle=False), 7)["shuffle"].startswith("none")
    assert order_of(StreamOptions(10, 3, shuffle=True), 7)["shuffle"].startswith("in blocks of")


def test_a_position_in_batches_that_there_cannot_be_is_refused():
    drop = Job((100,), 1, 100, StreamOptions(10, 3, remainder="drop")).pass_sequence(0)
    with pytest.raises(OptionError, match="in batches of 60 on 2 hosts, and there are 100 records"):
        drop.find(Position(0, 0, hosts=2, batch_size=60))
    short = Job((100,), 1, 100, StreamOptions(10, 3, remainder="short")).pass_sequence(0)
    assert short.find(Position(0, 0, hosts=2, batch_size=60)) == (Pass(0, 3), 0)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_in_a_later_epoch_of_a_pass_other_hosts_go_on_where_these_were(hosts: int):
    pass_sequence = Job((120,), 1, 20, StreamOptions(10, 3)).pass_sequence(0)
    pass_, step = pass_sequence.find(Position(2, 2, hosts=hosts, first_epoch=1))
    taken = ((20,) * hosts,) if hosts > 1 else ()
    assert (pass_.first_epoch, pass_.past, step) == ((2, taken, 0) if hosts > 1 else (1, (), 14))
