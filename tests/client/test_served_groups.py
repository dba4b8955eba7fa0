"""Loaders of a server's data set that share its batches, or all get the same, and are interrupted and cut off."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from restarted import Restarted
from serving import wait_until

import loaderd
from loaderd.errors import BusyError, ClosedError, OptionError

Check = Callable[[loaderd.Batch], list[int]]

NUM_RECORDS = 150


def in_turns(
    quick: loaderd.ServedLoader, slow: loaderd.ServedLoader, check: Check, num_batches: int
) -> tuple[list[list[int]], list[list[int]]]:
    """What each of two loaders gets of a pass that they share, of which the slow one asks half as often."""
    of_quick: list[list[int]] = []
    of_slow: list[list[int]] = []

    def all_are_taken() -> bool:
        return len(of_quick) + len(of_slow) == num_batches

    def consume_slowly() -> None:
        for batch in slow:
            of_slow.append(check(batch))
            wait_until(lambda: 2 * len(of_slow) <= len(of_quick) or all_are_taken())

    thread = threading.Thread(target=consume_slowly)
    thread.start()
    for batch in quick:
        of_quick.append(check(batch))
        wait_until(lambda: bool(of_slow))
    thread.join()
    return of_quick, of_slow


def test_consumers_that_take_turns(server: Restarted, check_batch: Check):
    """Whoever asks gets the next batch: who asks more often gets more, and together they get each batch once."""
    with contextlib.ExitStack() as opened:
        quick, slow = (opened.enter_context(server.connect(10, sharing="shared", consumers=2)) for _ in range(2))
        assert quick.sharing == "shared" and (quick.position.epoch, quick.position.batch) == (0, 0)
        for epoch in range(2):
            of_quick, of_slow = in_turns(quick, slow, check_batch, 15)
            assert sorted(number for numbers in of_quick + of_slow for number in numbers) == list(range(NUM_RECORDS))
            assert 0 < len(of_slow) < len(of_quick)
            assert quick.position == slow.position and quick.position.epoch == epoch + 1
        for refused in (quick.new_pass, lambda: quick.seek(loaderd.Position()), lambda: quick.fetch(None, 0)):
            with pytest.raises(OptionError, match="none can be asked for by its number"):
                refused()
        with pytest.raises(TypeError, match="nobody knows how many"):
            len(quick)


@pytest.mark.slow
def test_what_takes_turns_survives_the_server(server: Restarted, check_batch: Check):
    """It is killed again and again: what was used up does not come again, and nothing is left out."""
    with contextlib.ExitStack() as opened:
        loaders = [opened.enter_context(server.connect(20, sharing="shared", consumers=2)) for _ in range(2)]
        iterators = [iter(loader) for loader in loaders]
        found: list[int] = []

        def consume(batches: Iterator[loaderd.Batch], kills: Callable[[], None] | None) -> None:
            for batch in batches:
                found.extend(check_batch(batch))
                if kills is not None:
                    kills()

        thread = threading.Thread(target=consume, args=(iterators[0], None))
        thread.start()
        consume(iterators[1], server.kill_daemon)
        thread.join()
        assert sorted(found) == list(range(NUM_RECORDS))


@pytest.mark.slow
def test_its_place_is_taken_when_it_comes_back(server: Restarted, caplog: pytest.LogCaptureFixture):
    """As when a server notices late that a connection is lost: it waits until there is one."""
    options = {"batch_size": 10, "sharing": "shared", "consumers": 1}
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


@pytest.mark.slow
def test_consumers_that_all_get_the_same(server: Restarted, embedded: Any, check_batch: Check):
    with contextlib.ExitStack() as opened:
        loaders = [opened.enter_context(server.connect(sharing="mirrored", consumers=2)) for _ in range(2)]
        found: list[list[list[int]]] = [[], []]

        def consume(number: int) -> None:
            for batch in loaders[number]:
                found[number].append(check_batch(batch))
                if len(found[number]) == 4 and number == 0:
                    server.restart()

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [embedded()] * 2


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["close", "garbage", "interrupt"])
@pytest.mark.parametrize("sharing", ["mirrored", "shared"])
def test_what_a_member_holds_stays_as_it_is_when_its_connection_goes(
    server: Restarted, embedded: Any, check_batch: Check, sharing: Any, how: str
):
    """Its slots are filled again for the others."""
    options: dict[str, Any] = {"batch_size": 5, "sharing": sharing, "consumers": 2}
    with server.connect(**options) as other:
        loader = server.connect(**options)
        read: list[list[int]] = []
        thread = threading.Thread(target=lambda: read.extend(check_batch(batch) for batch in other))
        batches = iter(loader)
        if sharing == "mirrored":  # it begins when both have asked
            thread.start()
        batch = next(batches)
        ids = check_batch(batch)
        if sharing == "shared":
            thread.start()
        if how == "close":
            loader.close()
        elif how == "interrupt":
            loader._stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            next(batches, None)  # of a "shared" group, the other one may have had all
        del loader, batches
        thread.join()
        assert check_batch(batch) == ids
        assert len(read) >= 29 and (sharing == "shared" or read == embedded(batch_size=5))


def test_what_was_held_is_gone_when_nobody_holds_it(server: Restarted):
    with server.connect(5, sharing="shared") as loader:
        batches, held, found = iter(loader), [], []
        for _ in range(20):
            held = [*held[-1:], next(batches)]
            loader._stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            found.append(len(Path("/proc/self/maps").read_text().splitlines()))
        assert max(found) <= found[4] + 4


def test_a_batch_that_is_taken_while_the_loader_is_closed_is_not_given(server: Restarted):
    """By another thread: the server may fill its slot again before anybody sees it."""
    loader = server.connect(5, sharing="mirrored")
    reader = loader._stream._now.reader  # type: ignore[attr-defined]
    lend = reader.lend
    reader.lend = lambda *slot: (loader.close(), lend(*slot))[1]
    with pytest.raises(ClosedError):
        next(iter(loader))
