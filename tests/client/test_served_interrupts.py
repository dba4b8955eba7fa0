"""Ctrl-C at every point of what a served loader does while it is connected anew.

The functions are named, those of no concern to anybody else included: the promise is about every point in them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client import batch as batch_module
from loaderd.client import served_source, transport
from loaderd.client.page_consumer import PageConsumer
from loaderd.client.sources import Source
from loaderd.client.stream import Stream
from loaderd.client.stream_client import StreamClient
from loaderd.errors import ClosedError
from tests.helpers.interrupts import InterruptAt, points_of
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted


def mappings_of_slots() -> int:
    return sum("memfd:loaderd-slots" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_while_it_is_connected_anew(server: Restarted, numbered: Numbered):
    """Whatever is interrupted, the next call connects, and goes on with the next batch."""
    points = points_of(
        Stream._open,
        Stream._end_connection,
        Stream._use_data,
        served_source.ServedSource.connect,
        served_source.ServedSource.greeting,
        served_source.ServedSource.welcomed,
        Source.welcomed,
        served_source.ServedSource.pause_s,
        served_source.ServedSource.is_back,
        served_source.connect_to_server,
        transport.Transport.__init__,
        StreamClient.__init__,
        StreamClient.open,
        StreamClient._map,
    )
    with server.connect(10) as loader:
        expected = numbered.batches(loader)
        came, files, mappings = 0, len(os.listdir("/proc/self/fd")), mappings_of_slots()
        for number, point in enumerate(points):
            step = 4 * number % 13
            loader.load_state_dict(loaderd.Position(0, step))
            batches, found = iter(loader), []
            loader._stream._client.transport.kill()  # as if the server had hung up
            with InterruptAt(*point) as interrupt:
                found.append(numbered.check(next(batches)))
            came += interrupt.came
            found.append(numbered.check(next(batches)))
            assert found == expected[step : step + len(found)]
        assert came > 0.7 * len(points), "the others are where something fails"
        gc.collect()  # in Python 3.10, what was interrupted refers to itself
        # At two of the points, nobody owns the descriptor that has just come.
        assert len(os.listdir("/proc/self/fd")) <= files + 2 and mappings_of_slots() <= mappings


def test_an_interrupted_consumer_is_not_said_to_have_ended(server: Restarted):
    """It has another connection with the next batch: the server's log says so, and that it has ended at its end."""
    with server.connect(10, name="me") as loader:
        batches = iter(loader)
        next(batches)
        with InterruptAt(*points_of(PageConsumer.take)[0]):
            next(batches)
        next(batches)
        assert loader.statistics().daemon_restarts == 1
    server.now.wait_line("has ended")
    process = f"me (process {os.getpid()})"
    ours = [line.removeprefix(process) for line in server.now.said if process in line]
    reads = " reads train, independent"
    assert ours == [reads, " leaves: it connects anew", reads, " has ended"]


@pytest.mark.slow
def test_while_it_gives_up_a_connection_of_a_group(server: Restarted, numbered: Numbered):
    """What it holds stays as it is, though another consumer gets its slots."""
    points = points_of(
        transport.Transport.kill,
        transport.Transport.close,
        transport._end,
        transport._call,
        batch_module.SlotReader.make_private,
        batch_module._Lease.make_private,
    )
    numbered.write([6_000])
    server.restart()
    options: dict[str, Any] = {"batch_size": 2, "sharing": "mirrored", "consumers": 2}
    came = 0
    with server.connect(**options) as loader, server.connect(**options) as other:
        batches = iter(loader)

        def take_all() -> None:
            with contextlib.suppress(ClosedError):
                for _ in other:
                    pass

        thread = threading.Thread(target=take_all)
        thread.start()
        for point in points:
            held = next(batches)
            numbers = numbered.check(held)
            loader._stream._client.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            with InterruptAt(*point) as interrupt:
                next(batches)
            came += interrupt.came
            for _ in range(30):  # the other one is never far ahead
                next(batches)
            assert numbered.check(held) == numbers, point
        loader.close()
        other.close()
        thread.join()
    assert came >= 8
