"""Real daemons that are killed, stall or end, and another one that goes on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import ClosedError, DaemonError, OptionError
from loaderd.plan.passes import Pass
from tests.daemon.accidents import Check, Grenade, crashing_schema, fetch_all
from tests.helpers.own_processes import DAEMON, children_of, family_of, kill, newest_daemon, wait_ends, workers_of

Write = Callable[..., list[Path]]


def order_of(shards: list[Path], schema: loaderd.Schema, check: Check, **options: Any) -> list[list[int]]:
    """The batches of the first pass of a loader that nothing happens to."""
    with loaderd.Loader(shards, schema, **options) as loader:
        return [check(batch) for batch in loader]


SMALL: dict[str, Any] = {"batch_size": 10, "shuffle": loaderd.Shuffle(window_records=120, block_records=16)}


@pytest.mark.parametrize(
    "sign",
    [signal.SIGKILL, *(pytest.param(sign, marks=pytest.mark.slow) for sign in (signal.SIGSEGV, signal.SIGTERM))],
)
def test_the_daemon_may_die_again_and_again(
    write_numbered: Write,
    numbered_schema: loaderd.Schema,
    check_batch: Check,
    caplog: pytest.LogCaptureFixture,
    sign: signal.Signals,
):
    shards = write_numbered([300, 340])
    expected = order_of(shards, numbered_schema, check_batch, **SMALL, workers=1)
    with loaderd.Loader(shards, numbered_schema, **SMALL, workers=2) as loader:
        deaths = 0

        def before(step: int) -> None:
            nonlocal deaths
            if step in (0, 1, 30, 63):  # before the first batch, between two, before the last
                family = [os.pidfd_open(pid) for pid in family_of(newest_daemon())]
                signal.pidfd_send_signal(family[0], sign)
                wait_ends(family, 60)
                deaths += 1

        with caplog.at_level(logging.WARNING, "loaderd"):
            assert fetch_all(loader, check_batch, before=before) == expected
        assert 3 <= loader.statistics().daemon_restarts <= deaths
        assert loader.statistics().workers_restarted == 0
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"the daemon process was killed by {sign.name}; another one takes its place"
    assert len(said) == loader.statistics().daemon_restarts


@pytest.mark.slow
def test_batches_that_are_held_when_the_daemon_dies(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    """They keep the memory of the dead one, and none of the new one's slots is given back in their name."""
    shards = write_numbered([600])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, shuffle=False, workers=1, held_batches=3) as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        for _ in range(4):
            kill(newest_daemon())
            for _ in range(10):
                held.append(next(batches))
                del held[0]
        held += batches
        numbers = [number for batch in held for number in check_batch(batch)]
        assert numbers == list(range(600))[-len(numbers) :] and len(held) == 60 - 40
        assert loader.statistics().daemon_restarts == 4


@pytest.mark.one_variant
@pytest.mark.parametrize(("sign", "restarts"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_the_daemon_ends_in_the_middle_of_a_wait(
    write_numbered: Write, tmp_path: Path, sign: signal.Signals, restarts: int
):
    """A worker is busy, and the consumer waits for it, when the daemon dies; or stops, which nobody notices.

    For the batches are granted, and need it no more.
    """
    began, go_on = tmp_path / "began", tmp_path / "go on"

    def wait(numbers: Any, began: str = str(began), go_on: str = str(go_on)) -> Any:
        import os
        import time

        while 35 in numbers and not os.path.exists(go_on):
            open(began, "a").close()
            time.sleep(0.01)
        return numbers

    schema = crashing_schema(wait)
    with loaderd.Loader(write_numbered([100]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        daemon = newest_daemon()

        def disturb() -> None:
            while not began.exists():
                time.sleep(0.01)
            family = [os.pidfd_open(pid) for pid in family_of(daemon)]
            os.kill(daemon, sign)
            if restarts:  # else the worker may be done with all batches before it is gone
                wait_ends(family, 60)
            go_on.touch()

        thread = threading.Thread(target=disturb)
        thread.start()
        assert [number for batch in loader for number in batch["x"]] == list(range(100))
        thread.join()
        assert loader.statistics().daemon_restarts == restarts
        assert Path(f"/proc/{daemon}").exists() != bool(restarts)


def test_a_daemon_that_stalls(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    """What is granted it is not needed for: two windows of 16,384 records."""
    shards = write_numbered([40_000])
    with loaderd.Loader(shards, numbered_schema, batch_size=100, shuffle=False, workers=2, stall_timeout=2) as loader:
        batches = iter(loader)
        numbers = check_batch(next(batches))
        family = [os.pidfd_open(pid) for pid in family_of(newest_daemon())]
        signal.pidfd_send_signal(family[0], signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "loaderd"):
            for batch in batches:
                numbers += check_batch(batch)
        assert numbers == list(range(40_000))
        wait_ends(family, 60)
    said = "the daemon process said nothing for 2 s and was killed; another one takes its place"
    assert any(said in message for message in caplog.messages)


@pytest.mark.slow
def test_a_busy_worker_is_no_stalled_daemon(write_numbered: Write, tmp_path: Path):
    """The daemon answers when it is asked."""
    once = str(tmp_path / "once")

    def dawdle(numbers: Any) -> Any:
        import os
        import time

        if 35 in numbers and not os.path.exists(once):
            open(once, "x").close()
            time.sleep(3)
        return numbers

    with loaderd.Loader(
        write_numbered([100]), crashing_schema(dawdle), batch_size=10, shuffle=False, workers=1, stall_timeout=2
    ) as loader:
        assert [number for batch in loader for number in batch["x"]] == list(range(100))
        assert loader.statistics().daemon_restarts == 0


@pytest.mark.slow
def test_the_daemon_dies_while_it_opens(
    write_numbered: Write, tmp_path: Path, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")

    def crash() -> Any:
        import os

        if not os.path.exists(twice):
            os.rename(once, twice) if os.path.exists(once) else open(once, "x").close()
            os.kill(os.getpid(), 9)
        return abs

    schema = crashing_schema(Grenade("loaderd-daemon", crash))
    with (
        caplog.at_level(logging.WARNING, "loaderd"),
        loaderd.Loader(write_numbered([100]), schema, batch_size=10, shuffle=False, workers=1) as loader,
    ):
        assert list(chain(*map(check_batch, loader))) == list(range(100))
        assert loader.statistics().daemon_restarts == 2
    warning = "the daemon process was killed by SIGKILL; another one takes its place"
    assert [record.getMessage() for record in caplog.records] == [warning] * 2


@pytest.mark.slow
def test_daemons_that_die_in_a_row(write_numbered: Write, numbered_schema: loaderd.Schema, tmp_path: Path):
    """An error says so; who asks again gets another try, and then exactly the next batch."""
    lethal = tmp_path / "lethal"

    def crash(lethal: str = str(lethal)) -> Any:
        import os

        if os.path.exists(lethal):
            os._exit(9)
        return abs

    schema = crashing_schema(Grenade("loaderd-daemon", crash))
    with loaderd.Loader(write_numbered([900]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        found = [next(batches)["id"][0]]
        lethal.touch()
        kill(newest_daemon())
        with pytest.raises(
            DaemonError, match=r"3 daemons in a row ended without .*; the daemon process ended with status"
        ):
            while True:
                found.append(next(batches)["id"][0])
        lethal.unlink()
        found += [batch["id"][0] for batch in batches]
        assert found == list(range(0, 900, 10))


def test_another_daemon_refuses_other_data(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([500, 500])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        numbers = check_batch(next(batches))
        (other,) = write_numbered([500], "other")  # as many records, but others
        os.replace(other, shards[1])
        kill(newest_daemon())
        with pytest.raises(OptionError, match="the position belongs to other data or to another order:\n  shards: "):
            while True:
                numbers += check_batch(next(batches))
        assert numbers == list(range(len(numbers))), "what was ready is given out, and nothing else"
        with pytest.raises(ClosedError, match="the loader ended: the position belongs to other data"):
            next(batches)


@pytest.mark.slow
def test_another_daemon_has_room_for_what_was_left_by_other_hosts(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    """A batch of a pass that goes on with what several numbers of hosts left is cut from more windows than others."""
    shards = write_numbered([2000])
    options: dict[str, Any] = {"shuffle": loaderd.Shuffle(window_records=100, block_records=10), "workers": 1}
    start = loaderd.Position()
    for hosts, batches in ((7, 5), (3, 9), (5, 4)):
        with loaderd.Loader(
            shards, numbered_schema, batch_size=20, shard=(0, hosts), start=start, **options
        ) as loader:
            for _ in zip(range(batches), loader, strict=False):
                pass
            start = loader.position
    with loaderd.Loader(shards, numbered_schema, batch_size=90, start=start, **options) as loader:
        first, second = loader._new_pass(), loader._new_pass()
        expected = [check_all(loader, *begin, check_batch) for begin in (first, second)]
    with loaderd.Loader(shards, numbered_schema, batch_size=90, start=start, **options) as loader:
        assert first[0].past and (loader._new_pass(), loader._new_pass()) == (first, second)
        for dies, begin, batches in ((1, first, expected[0]), (1, second, expected[1]), (0, first, expected[0])):
            if dies:
                kill(newest_daemon())
            assert check_all(loader, *begin, check_batch) == batches


def check_all(loader: loaderd.Loader, pass_: Pass, step: int, check: Check) -> list[list[int]]:
    """The batches of a pass."""
    found = []
    while (batch := loader._fetch(pass_, step)) is not None:
        found.append(check(batch))
        step += 1
    return found


@pytest.mark.slow
def test_the_daemon_of_growing_data_dies(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    """In the middle of an epoch, whose shards another daemon finds again, and when the shards are to be listed."""
    paths = write_numbered([50, 60, 70, 80, 90], "all")
    folder = tmp_path / "growing"
    folder.mkdir()
    new = iter(paths)

    def grow() -> None:
        path = next(new)
        path.rename(folder / path.name)

    grow()
    dataset = loaderd.Dataset(str(folder / "*.tfrecord"), numbered_schema, refresh="epoch")
    with loaderd.Loader(dataset, batch_size=10, epochs=None, workers=1, remainder="drop") as loader:
        batches = iter(loader)
        for records in (50, 110, 180, 260):
            numbers = []
            for step in range(records // 10):
                if step in (0, 3):
                    kill(*children_of(os.getpid(), DAEMON))  # it may be dead, and nobody has noticed
                numbers += check_batch(next(batches))
                if step == 1:
                    grow()
            assert sorted(numbers) == list(range(records))
        kill(*children_of(os.getpid(), DAEMON))
        (folder / paths[0].name).unlink()  # nothing that is to come needs it
        assert min(check_batch(next(batches))) >= 50
        (folder / paths[1].name).unlink()
        kill(*children_of(os.getpid(), DAEMON))
        with pytest.raises(OptionError, match="the position belongs to 4 shards"):
            list(batches)


def test_what_the_daemon_said_last_is_not_lost(write_numbered: Write, tmp_path: Path):
    """It gave up and ended while nobody listened."""
    no_more = str(tmp_path / "no more")
    schema = crashing_schema(
        Grenade("loaderd-worker", lambda: os._exit(7) if os.path.exists(no_more) else lambda numbers: numbers)
    )
    with loaderd.Loader(write_numbered([200]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        daemon = os.pidfd_open(newest_daemon())
        next(iter(loader))
        Path(no_more).touch()
        kill(*workers_of(newest_daemon()))
        wait_ends([daemon], 60)
        loader.load_state_dict(loaderd.Position(0, 5))
        with pytest.raises(DaemonError, match="10 workers died without having done anything"):
            next(iter(loader))
