"""Consumers that write and send what no consumer should: it harms themselves alone."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import loaderd
from loaderd.daemon.delivery.consumers import Consumers
from loaderd.daemon.indexing.preparation import LocalPreparation
from loaderd.daemon.session import Session
from loaderd.dataset import StreamDescription
from loaderd.errors import LoaderdError, ServerError
from loaderd.ipc.messages import ListData, Opened, StartPass, Subscribe
from loaderd.ipc.subscription import Subscription
from loaderd.options import MAX_STEP, StreamOptions
from loaderd.plan.passes import Pass
from loaderd.shm.page import CONSUMER
from tests.daemon.page_workers import new_page, plan_of, stream_of
from tests.daemon.served import ServedDaemon, flat, serve
from tests.daemon.worker_manager_run import Crew
from tests.helpers.own_processes import kill, workers_of

Write = Callable[..., list[Path]]

MODULE = """
import loaderd

features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
schema = loaderd.Schema(features, {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")})
train = loaderd.Dataset("%(folder)s/shards/*.tfrecord", schema)
few = loaderd.Dataset("%(folder)s/few/*.tfrecord", schema)
mix = loaderd.Mix({"train": 0.5, "few": 0.5}, {"train": train, "few": few})
"""


@pytest.fixture
def daemon(write_numbered: Write, tmp_path: Path) -> Iterator[ServedDaemon]:
    write_numbered([100])
    write_numbered([10], "few")
    with serve(tmp_path, "few_numbers", MODULE % {"folder": tmp_path}, "train", "mix") as daemon:
        yield daemon


@pytest.mark.one_variant
@pytest.mark.parametrize("all_words", [False, True])
@pytest.mark.parametrize("number", [1 << 62, (1 << 63) - 1, -1, -(1 << 63)])
def test_any_number_in_its_page(daemon: ServedDaemon, number: int, all_words: bool):
    """In its own words, and in those of the daemon and of the workers, one of which dies then."""
    hostile, other = daemon.subscribe(), daemon.subscribe()
    hostile.start(Pass(0, None)).wait_for_batch()
    words = hostile.page.words
    for word in range(len(words)) if all_words else range(CONSUMER.start, CONSUMER.stop):
        words[word] = number
    assert len(daemon.report()["consumers"]) == 2
    kill(workers_of(daemon.process.pid)[0])
    assert sorted(flat(other.read())) == list(range(100))
    assert len(daemon.report()["consumers"]) == 2


def test_listings_that_nobody_waits_for_are_given_up(numbered_schema: loaderd.Schema):
    dataset = loaderd.Dataset("*.tfrecord", numbered_schema, refresh="epoch")
    description = StreamDescription(dataset, StreamOptions(10))
    crew = Crew()
    prepare = partial(LocalPreparation, dataset, description.options, crew.worker_manager)
    session = Session(
        0, description, b"", crew.worker_manager, lambda *_: None, prepared=prepare(None), prepare=prepare
    )
    stream = stream_of(plan_of(100, 10, 50), new_page(8, 1))
    session.consumers = Consumers(stream, (), lambda column: None)
    session.opened = SimpleNamespace(stream=stream)  # type: ignore[assignment]
    for _ in range(50):
        session.received(1, ListData(None))
    assert len(crew.worker_manager.scheduler._sources) == 1
    session.consumers = session.opened = None
    session.close()
    assert not crew.worker_manager.scheduler._sources
    crew.close()


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("first_epoch", "step"), [((1 << 63) - 1, 0), (1 << 62, 0), (1 << 31, 0), ((1 << 30) - 1, MAX_STEP)]
)
def test_an_epoch_that_nobody_comes_to(daemon: ServedDaemon, first_epoch: int, step: int):
    """The sets of a mix are in other epochs, which could be more than a message may hold."""
    hostile, other = daemon.subscribe("mix"), daemon.subscribe()
    hostile.send(StartPass(1, Pass(first_epoch, None), step))
    with pytest.raises(ServerError, match="no pass comes to epoch"):
        hostile.receive(Opened)
    assert sorted(flat(other.read())) == list(range(100))


def test_who_is_sent_away_before_the_stream_is_there_keeps_no_place_in_its_group(daemon: ServedDaemon):
    daemon.subscribe().close()
    workers = workers_of(daemon.process.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    first, hostile, second = daemon.connect(), daemon.connect(), daemon.connect()
    for one in (first, hostile, second):
        one.hello()
        one.send(Subscribe(Subscription(10, sharing="mirrored", consumers=2).to_wire(), None))
        if one is hostile:
            one.send(StartPass(1, Pass(0, 1), 0))
            with pytest.raises(LoaderdError, match="before the stream was there"):
                one.receive(Opened)
        daemon.wait_for_consumers(2 if one is second else 1)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    for one in (first, second):
        one.receive(Opened)


def test_a_pass_is_started_once(daemon: ServedDaemon):
    hostile = daemon.subscribe().start(Pass(0, 1)).start(Pass(0, 1))
    with pytest.raises(ServerError, match="generation 1 does not come after generation 1"):
        hostile.receive(Opened)


def test_a_process_of_another_user_may_not_connect(daemon: ServedDaemon):
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    for folder in [daemon.path, *daemon.path.parents][:-2]:
        os.chmod(folder, 0o777)
    child = os.fork()
    if child == 0:  # no other program: this interpreter may be one that others cannot run
        os.setuid(65534)
        other = socket.socket(socket.AF_UNIX)
        other.connect(str(daemon.path))
        os._exit(len(other.recv(1)))
    assert os.waitpid(child, 0)[1] == 0
    report = daemon.report()
    assert (report["consumers"], report["sent_away"]) == ([], 1)
