"""Ctrl-C at every point of what a served loader does while it is connected anew, and while it takes its turns.

The functions are named, those of no concern to anybody else included: the promise is about every point in them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupts import InterruptAt, points_of
from restarted import Restarted

import loaderd
from loaderd.client import batch as batch_module
from loaderd.client import link, served_sources, shared_stream, supervised
from loaderd.client.connection import Connection

Check = Callable[[loaderd.Batch], list[int]]


def mappings_of_slots() -> int:
    return sum("memfd:loaderd-slots" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_while_it_is_connected_anew(server: Restarted, check_batch: Check):
    """Whatever is interrupted, the next call connects, and goes on with the next batch."""
    points = points_of(
        supervised.SupervisedStream._open,
        supervised.SupervisedStream._take_leave,
        supervised.SupervisedStream._use_data,
        served_sources.ServedSource.link,
        served_sources.ServedSource.greeting,
        served_sources.ServedSource.welcomed,
        served_sources.ServedSource.pause_s,
        served_sources.ServedSource.is_back,
        link.link_to_server,
        link.Link.__init__,
        Connection.__init__,
        Connection.open,
    )
    with server.connect(10) as loader:
        expected = [check_batch(batch) for batch in loader]
        came, files, mappings = 0, len(os.listdir("/proc/self/fd")), mappings_of_slots()
        for number, point in enumerate(points):
            step = 4 * number % 13
            loader.seek(loaderd.Position(0, step))
            batches, found = iter(loader), []
            loader._stream._now.link.kill()  # as if the server had hung up
            with InterruptAt(*point) as interrupt:
                found.append(check_batch(next(batches)))
            came += interrupt.came
            found.append(check_batch(next(batches)))
            assert found == expected[step : step + len(found)]
        assert came > 0.7 * len(points), "the others are where something fails"
        gc.collect()  # in Python 3.10, what was interrupted refers to itself
        # At two of the points, nobody owns the descriptor that has just come.
        assert len(os.listdir("/proc/self/fd")) <= files + 2 and mappings_of_slots() <= mappings


def test_while_it_takes_its_turn(server: Restarted, check_batch: Check):
    """No batch is lost: what did not reach the user is lent again."""
    points = points_of(
        shared_stream.SharedIteration.__next__,
        shared_stream.SharedStream.take,
        shared_stream.SharedStream.keep,
        shared_stream.SharedStream._follow,
        shared_stream.SharedStream._join,
        Connection.want,
        Connection.next_batch,
    )
    came = 0
    with server.connect(1, sharing="shared") as loader:
        while points:
            batches, found = iter(loader), []
            for batch in batches:
                found += check_batch(batch)
                if points:
                    with InterruptAt(*points.pop()) as interrupt:
                        found += check_batch(next(batches))
                    came += interrupt.came
            assert sorted(found) == list(range(150))
    assert came >= 15


@pytest.mark.slow
def test_far_in_front_of_what_another_still_has(server: Restarted, write_numbered: Any):
    """Nothing that it has had comes again, however much that is."""
    write_numbered([18_000])
    options: dict[str, Any] = {"batch_size": 1, "sharing": "shared", "consumers": 2}
    server.restart()
    with server.connect(**options) as slow, server.connect(**options) as quick:
        slows, quicks, stream = iter(slow), iter(quick), quick._stream
        held = next(slows)
        next(quicks)
        stream._taken.update(range(1, 17_000))  # type: ignore[attr-defined] # it would take some seconds
        stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
        next(quicks)
        assert stream._now.step == 17_000  # type: ignore[attr-defined]
        del held


@pytest.mark.slow
def test_while_it_gives_up_a_connection_of_a_group(server: Restarted, write_numbered: Any, check_batch: Check):
    """What it holds stays as it is, though another consumer gets its slots."""
    points = points_of(
        link.Link.kill,
        link.Link.close,
        link._end,
        link._call,
        batch_module.SlotReader.make_private,
        batch_module._Lease.make_private,
    )
    write_numbered([6_000])
    server.restart()
    options: dict[str, Any] = {"batch_size": 2, "sharing": "shared", "consumers": 2}
    came = 0
    with server.connect(**options) as loader, server.connect(**options) as other:
        batches, others = iter(loader), iter(other)
        for point in points:
            held = next(batches)
            numbers = check_batch(held)
            loader._stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            with InterruptAt(*point) as interrupt:
                next(batches)
            came += interrupt.came
            next(batches)
            for _ in range(30):
                next(others)
            assert check_batch(held) == numbers, point
    assert came >= 8
