"""Loaders of a server's data set that all get the same batches, and are interrupted and cut off."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import BusyError, ClosedError
from loaderd.observe.running_streams import running_streams
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted


@pytest.mark.slow
def test_its_place_is_taken_when_it_comes_back(server: Restarted, caplog: pytest.LogCaptureFixture):
    """As when a server notices late that a connection is lost: it waits until there is one."""
    options = {"batch_size": 10, "sharing": "mirrored", "consumers": 1}
    with server.connect(**options) as loader:
        batches = iter(loader)
        next(batches)
        server.restart()
        other = server.connect(**options)
        with pytest.raises(BusyError, match="the group '' has its 1 consumers"):
            server.connect(**options)
        threading.Timer(0.5, other.close).start()
        assert len(list(batches)) == 14
    gone, refused, _ = [record.message for record in caplog.records]
    assert "calling it for up to" in gone and "the group '' has its 1 consumers; calling it" in refused


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["close", "garbage", "interrupt"])
def test_what_a_member_holds_stays_as_it_is_when_its_connection_goes(
    server: Restarted, embedded: Any, numbered: Numbered, how: str
):
    """Its slots are filled again for the others."""
    options: dict[str, Any] = {"batch_size": 5, "sharing": "mirrored", "consumers": 2}
    with server.connect(**options) as other:
        loader = server.connect(**options)
        read: list[list[int]] = []
        thread = threading.Thread(target=lambda: read.extend(numbered.check(batch) for batch in other))
        batches = iter(loader)
        thread.start()  # it begins when both have asked
        batch = next(batches)
        ids = numbered.check(batch)
        if how == "close":
            loader.close()
        elif how == "interrupt":
            loader._stream._client.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            next(batches)
        del loader, batches
        thread.join()
        assert numbered.check(batch) == ids
        assert read == embedded(batch_size=5)


def test_what_was_held_is_gone_when_nobody_holds_it(server: Restarted):
    with server.connect(5, sharing="mirrored") as loader:
        batches, held, found = iter(loader), [], []
        for _ in range(20):
            held = [*held[-1:], next(batches)]
            loader._stream._client.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            found.append(len(Path("/proc/self/maps").read_text().splitlines()))
        assert max(found) <= found[4] + 4


def test_a_batch_that_is_taken_while_the_loader_is_closed_is_not_given(server: Restarted):
    """By another thread: the server may fill its slot again before anybody sees it."""
    loader = server.connect(5, sharing="mirrored")
    reader = loader._stream._client.reader  # type: ignore[attr-defined]
    lend = reader.lend
    reader.lend = lambda *slot: (loader.close(), lend(*slot))[1]
    with pytest.raises(ClosedError):
        next(iter(loader))


def test_members_are_not_judged(server: Restarted):
    """``loaderd top`` shows the streams that are found."""
    with server.connect(5) as alone, server.connect(5, sharing="mirrored") as member:
        next(iter(alone))
        next(iter(member))
        daemon = frozenset({server.now.daemon})
        assert [stream.consumer for stream in running_streams(daemon)] == [os.getpid()]
        assert "no diagnosis for consumers of a group" in str(member.diagnose())
