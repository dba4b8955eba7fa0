"""Several real consumers of one real server, each way of sharing: they are killed, and so is the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import ServerError
from tests.helpers.serving import MODULE, Server, wait_until

CONSUMER = str(Path(__file__).with_name("consumer.py"))
RECORDS, BATCH = 400, 10
ALL = 1000  # batches, of which a pass has fewer: so, to the end of it


class Consumer:
    """A process that reads, by ``consumer.py``. ``had``: what it was given; None where a pass ended."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.had: list[list[int] | None] = []
        self.position: str | None = None
        self._begin({})

    def _begin(self, more: dict[str, Any]) -> None:
        options = json.dumps({"batch_size": BATCH, "reconnect_timeout": 60, **self.options, **more})
        self.process = subprocess.Popen(
            [sys.executable, CONSUMER, options],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, number: int) -> None:
        """Have it take so many batches, or as many as there are in the pass."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def hear(self) -> None:
        """Wait until it has done what it was told last; or has connected."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "\n":
                return
            item = json.loads(line)
            self.had.append(item.get("ids"))
            self.position = item.get("position")
        raise AssertionError("it has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        """Kill it, and start it where it was, as who keeps a checkpoint."""
        self.kill()
        self._begin({"start": self.position})
        self.hear()


class Group:
    """A server, and consumers of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.consumers: list[Consumer] = []
        self.start_server()

    def start_server(self, *options: str) -> None:
        self.server = Server(self.folder, "numbered:train", "--workers", "1", *options)
        self.server.wait_line("connect with")

    def restart_server(self, *options: str) -> None:
        """All of its processes are killed, and it is started as before."""
        self.server.close()
        self.start_server(*options)

    def kill_daemon(self) -> None:
        """Its supervisor starts another."""
        os.kill(self.server.daemon, signal.SIGKILL)

    def add(self, *all_options: dict[str, Any]) -> list[Consumer]:
        added = [Consumer(self.folder, **options) for options in all_options]
        self.consumers += added
        for one in added:
            one.hear()
        return added

    def connect(self, **options: Any) -> loaderd.Loader:
        return loaderd.connect(f"unix://{self.folder}/x.sock", dataset="train", batch_size=BATCH, **options)

    def report(self, consumer: Consumer) -> dict[str, Any]:
        """What the server knows of a consumer."""
        (found,) = [one for one in self.server.report()["consumers"] if one["pid"] == consumer.process.pid]
        return found

    def states(self) -> list[str]:
        """What its consumers wait for; one that has only just connected has nothing to say."""
        return [each["state"] for each in self.server.report()["consumers"] if "state" in each]

    def close(self) -> None:
        for one in self.consumers:
            one.process.kill()
            one.process.communicate()
        self.server.close()


@pytest.fixture
def group(tmp_path: Path, write_numbered: Callable[[list[int]], list[Path]]) -> Iterator[Group]:
    write_numbered([RECORDS // 2, RECORDS // 2])
    (tmp_path / "numbered.py").write_text(MODULE)
    made = Group(tmp_path)
    yield made
    made.close()


@pytest.fixture
def embedded(group: Group) -> Callable[..., list[list[int]]]:
    """The batches of an embedded loader."""

    def read(**options: Any) -> list[list[int]]:
        schema = loaderd.Schema({"id": loaderd.Int64(), "bits": loaderd.PackedBits(32)}, {"id": loaderd.Array("id")})
        shards = str(group.folder / "shards" / "*.tfrecord")
        with loaderd.Loader(shards, schema, batch_size=BATCH, workers=1, **options) as loader:
            return [batch["id"].tolist() for batch in loader]

    return read


def take(number: int, *consumers: Consumer) -> None:
    """All of them at the same time."""
    for one in consumers:
        one.ask(number)
    for one in consumers:
        one.hear()


def test_split_each_rank_gets_its_part_whoever_is_killed(group: Group, embedded: Any):
    ranks = group.add(*[{"sharing": "split", "shard": (rank, 3), "epochs": 2} for rank in range(3)])
    take(4, *ranks)
    ranks[0].restart()
    take(4, *ranks)
    group.kill_daemon()
    take(4, *ranks)
    ranks[1].kill()
    group.restart_server()
    ranks[1].restart()
    take(ALL, *ranks)
    for rank, one in enumerate(ranks):
        assert one.had == [*embedded(shard=(rank, 3), epochs=2), None]
    assert len({len(one.had) for one in ranks}) == 1
    assert sorted(number for one in ranks for ids in one.had for number in ids or []) == sorted(
        2 * list(range(RECORDS))
    )


@pytest.mark.slow
def test_mirrored_all_get_all_whoever_is_killed(group: Group, embedded: Any):
    models = group.add(*2 * [{"sharing": "mirrored", "consumers": 2, "epochs": 2}])
    take(3, *models)
    models[0].restart()
    take(3, *models)
    group.kill_daemon()
    take(20, *models)  # more than were on their way: so both have come back
    models[1].kill()
    take(20, models[0])
    models[1].restart()
    take(20, models[1])  # and the other has many of those behind them
    group.restart_server()
    take(ALL, *models)
    take(2, *models)
    batches = embedded(epochs=4)
    for one in models:
        passes = [*batches[:80], None, *batches[80:]]
        assert one.had == passes[: len(one.had)] and len(one.had) == 83


def test_mirrored_the_slowest_sets_the_pace_while_it_is_there(group: Group):
    slow, quick = group.add(*2 * [{"sharing": "mirrored", "consumers": 2}])
    slow.ask(1)
    quick.ask(ALL)
    slow.hear()
    wait_until(lambda: group.report(quick)["batches"] > 1)  # all slots may be full before it takes its first batch
    wait_until(lambda: "to give batches back" in group.report(quick)["state"])
    assert group.report(slow)["batches"] == 1 < group.report(quick)["batches"] < RECORDS // BATCH
    slow.kill()
    quick.hear()
    assert sorted(number for ids in quick.had for number in ids or []) == list(range(RECORDS))


@pytest.mark.slow
def test_mirrored_a_stopped_member_is_waited_for_and_a_killed_one_is_not(group: Group, embedded: Any):
    stopped, killed, other = group.add(*3 * [{"sharing": "mirrored", "consumers": 3}])
    take(1, stopped, killed, other)
    for one in (stopped, killed):
        one.ask(ALL)  # and so they are somewhere in the middle of it
    os.kill(stopped.process.pid, signal.SIGSTOP)
    other.ask(ALL)
    wait_until(lambda: "to give batches back" in group.report(other)["state"])
    killed.kill()
    assert 0 < group.report(other)["batches"] < RECORDS // BATCH
    os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.hear()
    other.hear()
    assert stopped.had == other.had == [*embedded(), None]


@pytest.mark.slow
def test_who_is_sent_away_keeps_what_it_holds_until_it_hears_of_it(group: Group, embedded: Any):
    group.restart_server("--idle-timeout", "1")
    options = {"sharing": "mirrored", "consumers": 2}
    here = group.connect(**options)
    (other,) = group.add(options)
    other.ask(1)
    batches = iter(here)
    batch = next(batches)
    ids = batch["id"].tolist()
    other.hear()
    other.ask(ALL)
    group.server.wait_line("is sent away")
    other.hear()
    assert sorted(number for ids in other.had for number in ids or []) == list(range(RECORDS)), "nobody waits for it"
    assert batch["id"].tolist() == ids
    with pytest.raises(ServerError, match="has its 2 consumers, 1 of them sent away"):
        group.connect(**options)
    rest: list[list[int]] = []
    with pytest.raises(ServerError, match="has left its batches untaken"):
        rest.extend(each["id"].tolist() for each in batches)
    assert batch["id"].tolist() == ids
    assert rest == embedded()[1 : 1 + len(rest)]
    group.connect(**options).close()


@pytest.mark.slow
def test_a_reload_keeps_a_group_together(group: Group, embedded: Any):
    one, other = group.add(*2 * [{"sharing": "mirrored", "consumers": 2}])
    take(5, one, other)
    group.server.process.send_signal(signal.SIGHUP)
    group.server.wait_line("reloaded")
    one.ask(ALL)
    # It knows what both have had. The other one may know of nothing, and would begin the pass anew if it came first.
    wait_until(lambda: any("rest of its group" in state for state in group.states()))
    other.restart()
    take(ALL, other)
    one.hear()
    assert one.had == other.had == [*embedded(), None]
