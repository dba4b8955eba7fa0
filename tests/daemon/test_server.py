"""Many consumers of one daemon: each has what it asked for, and what one does costs the others nothing."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import loaderd
from loaderd.errors import CorruptRecordError, LoaderdError, OptionError, ServerError, WorkerError
from loaderd.ipc.messages import (
    PROTOCOL,
    AskState,
    AskStatus,
    Bye,
    DataListed,
    Drain,
    Hello,
    ListData,
    Opened,
    StartPass,
    State,
    Status,
    Stop,
    Subscribe,
)
from loaderd.ipc.subscription import Sharing, Subscription
from loaderd.plan.passes import Pass
from loaderd.version import VERSION
from tests.daemon.served import Consumer, ServedDaemon, flat, goodbye, serve
from tests.helpers.own_processes import all_workers_of, workers_of
from tests.helpers.serving import wait_until

Write = Callable[..., list[Path]]

MODULE = """
import loaderd

features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
schema = loaderd.Schema(features, {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")})
train = loaderd.Dataset("%(folder)s/shards/*.tfrecord", schema, shuffle=loaderd.Shuffle(300, block_records=50))
valid = loaderd.Dataset("%(folder)s/shards/*.tfrecord", schema, shuffle=False).take(100)
growing = loaderd.Dataset("%(folder)s/growing/*.tfrecord", schema, refresh="epoch")
broken = loaderd.Dataset("%(folder)s/broken/*.tfrecord", schema)
lost = loaderd.Dataset("%(folder)s/nothing/*.tfrecord", schema)


def only_here():
    import os

    if "loaderd-worker" in open("/proc/self/comm").read():
        raise ImportError("not in a worker")
    return only_here, ()


class Unpicklable:
    def __call__(self, id):
        return id

    def __reduce__(self):
        return load, ()


def load():
    raise ImportError("not in a worker")


fields = {"id": loaderd.Array("id"), "odd": loaderd.Derived(Unpicklable(), ("id",))}
strange = loaderd.Dataset("%(folder)s/shards/*.tfrecord", loaderd.Schema(features, fields))
number = 7
"""
_SETS = "The data sets in limited are broken, growing, lost, strange, train, valid.$"


@pytest.fixture
def daemon(write_numbered: Write, tmp_path: Path) -> Iterator[ServedDaemon]:
    write_numbered([500, 300])
    write_numbered([40], "growing")
    (path,) = write_numbered([40], "broken")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    names = ("train", "valid", "growing", "broken", "lost", "strange")
    with serve(tmp_path, "numbered_sets", MODULE % {"folder": tmp_path}, *names) as daemon:
        yield daemon


def expected(folder: Path, **options: object) -> list[list[int]]:
    """The ids of an epoch's batches of 10, as an embedded loader delivers them."""
    features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
    schema = loaderd.Schema(features, {"id": loaderd.Array("id")})
    shuffle = loaderd.Shuffle(300, block_records=50)
    with loaderd.Loader(f"{folder}/shards/*.tfrecord", schema, batch_size=10, shuffle=shuffle, **options) as loader:
        return [batch["id"].tolist() for batch in loader]


# ------------------------------------------------------------------------------------------ what they get


def test_who_does_not_read_stops_nobody(daemon: ServedDaemon, tmp_path: Path):
    asleep = daemon.subscribe()
    asleep.start(Pass(0, None))
    assert daemon.subscribe().read() == expected(tmp_path)
    state = {each["number"]: each for each in daemon.report()["consumers"]}
    assert max(each["slots_lent"] for each in state.values()) == state[max(state)]["slots"]


def test_sets_that_grow_are_listed_by_each_consumer(daemon: ServedDaemon, write_numbered: Write):
    consumer = daemon.subscribe("growing")
    listing = next(message for message in consumer.passed if isinstance(message, DataListed)).listing
    assert len(flat(consumer.read())) == 40
    write_numbered([40, 10], "growing")
    consumer.send(ListData(None))
    listed = consumer.receive(DataListed)
    assert listed.error is None and listed.facts["num_records"] == 50 and listed.listing != listing
    consumer.start(Pass(1, 1), 2).wait_for_batch()
    consumer.send(ListData([["no.tfrecord", "such.tfrecord", 3, "00000000"]]))
    assert consumer.receive(DataListed).error is not None  # and goes on
    assert len(flat(daemon.subscribe("growing").read())) == 50


@pytest.mark.parametrize("sharing", ["independent", pytest.param("split", marks=pytest.mark.slow), "mirrored"])
def test_slots_of_several_consumers_can_only_be_read(daemon: ServedDaemon, sharing: Sharing):
    consumer = daemon.connect()
    consumer.hello()
    consumer.send(Subscribe(Subscription(10, sharing=sharing).to_wire(), None)).receive(Opened)
    fd = consumer.channel.take_fd()
    if sharing == "mirrored":
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
    else:
        mmap.mmap(fd, 4096).close()
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.slow
def test_what_a_consumer_had_is_given_back(daemon: ServedDaemon):
    def visit() -> None:
        consumer = daemon.subscribe()
        consumer.start(Pass(0, None)).wait_for_batch()
        consumer.close()
        daemon.wait_for_consumers(0)

    visit()
    before = daemon.descriptors()
    workers = all_workers_of(daemon.process.pid, 2)

    def mapped(pid: int) -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:loaderd")

    for _ in range(20):
        visit()
    wait_until(lambda: daemon.descriptors() == before)
    assert daemon.report()["memory_bytes"] == 0

    def workers_know() -> bool:
        consumer = daemon.subscribe()
        consumer.read()  # a worker takes note of the ends when it does something, and another one may do it all
        consumer.close()
        return max(mapped(pid) for pid in workers) <= 4

    wait_until(workers_know)
    assert workers_of(daemon.process.pid) == workers


# ---------------------------------------------------------------------------------------------- refusals


def refused(consumer: Consumer, error: type[LoaderdError], match: str) -> None:
    with pytest.raises(error, match=match):
        consumer.receive(Bye)
    assert consumer.is_closed()


def test_what_cannot_be_had_is_refused_with_a_reason(daemon: ServedDaemon):
    options = Subscription(10).to_wire()
    hello = Hello(PROTOCOL, VERSION, "train")
    version = rf"loaderd {loaderd.__version__} .* protocol {PROTOCOL}; the consumer is loaderd 9.9 and speaks 99"
    start = Pass(0, 1)
    cases: list[tuple[Sequence[object], type[LoaderdError], str]] = [
        ([Hello(99, "9.9", "train")], ServerError, version),
        ([Hello(PROTOCOL, VERSION, "other")], ServerError, "no data set 'other'; this server has: .*train, valid"),
        ([Subscribe(options, None)], ServerError, "first message must be Hello"),
        ([hello, hello], ServerError, "Hello came twice"),
        ([hello, ListData(None)], ServerError, "ListData came before Subscribe"),
        ([hello, Subscribe(options, None), ListData(None)], LoaderdError, "before the stream was there|that grows"),
        ([hello, Subscribe({}, None)], OptionError, "batch_size among them"),
        ([hello, Subscribe({**options, "batch_size": 900, "remainder": "drop"}, None)], OptionError, "at most 800"),
        ([hello, Subscribe({**options, "held_batches": 65}, None)], ServerError, "at most 64 here, got 65"),
        (
            [hello, Subscribe({**options, "batch_size": 1 << 62}, None)],
            LoaderdError,
            "batch_size must|not enough memory",
        ),
        ([hello, Subscribe(options, '{"version": 1}')], OptionError, "position must be"),
        ([hello, Subscribe(options, None), Subscribe(options, None)], ServerError, "Subscribe came twice"),
        ([hello, Stop("I say so")], ServerError, "no message of loaderd: Stop must not come here"),
        ([Hello(PROTOCOL, VERSION, "broken"), Subscribe(options, None)], CorruptRecordError, "1 damaged record"),
        ([Hello(PROTOCOL, VERSION, "lost"), Subscribe(options, None)], LoaderdError, "nothing"),
        ([Hello(PROTOCOL, VERSION, "strange"), Subscribe(options, None)], WorkerError, "not in a worker"),
    ]
    healthy = daemon.subscribe()
    for messages, error, match in cases:
        consumer = daemon.connect()
        consumer.send(*messages)
        refused(consumer, error, match)
    refused(daemon.subscribe(sharing="mirrored").send(StartPass(1 << 60, start, 0)), OptionError, "StartPass must be")
    refused(daemon.subscribe().send(ListData(None)), OptionError, "grows")
    refused(daemon.subscribe().send(StartPass(1, Pass(-1, 1), 0)), OptionError, "first_epoch must be")
    # The ends of three windows: a batch reaches over all of them, and there is memory for two windows.
    ends = Pass(0, 1, ((260, 260, 260),))
    refused(daemon.subscribe().send(StartPass(1, ends, 0)), OptionError, "needs 3 at a time; there are 2 of 267")
    assert len(flat(healthy.read())) == 800
    assert daemon.report()["workers_restarted"] == 0


@pytest.mark.slow
def test_limits(write_numbered: Write, tmp_path: Path):
    write_numbered([500, 300])
    source = MODULE % {"folder": tmp_path}
    limits = {"max_consumers": 2, "idle_timeout": 3.0}
    with serve(tmp_path, "limited_sets", source, "train", **limits) as daemon:
        first, second = daemon.subscribe(), daemon.subscribe()
        third = daemon.connect().send(Hello(PROTOCOL, VERSION, "train"))
        refused(third, ServerError, "the server already has its maximum of 2 consumers")
        many = Subscription(10, sharing="mirrored", consumers=3).to_wire()
        second.close()
        daemon.wait_for_consumers(1)
        greedy = daemon.connect().send(Hello(PROTOCOL, VERSION, "train"), Subscribe(many, None))
        refused(greedy, ServerError, "consumers must be at most 2 here, got 3")
        second = daemon.subscribe()
        status = daemon.connect().send(Hello(PROTOCOL, VERSION, ""), AskStatus())
        assert len(status.receive(Status).report["consumers"]) == 2
        assert len(flat(first.read(epochs=4))) == 3200
        assert daemon.report()["consumers"][0]["records"] == 3200
        time.sleep(4.0)
        assert len(daemon.report()["consumers"]) == 2, "there is nothing that the second could take"
        second.start(Pass(0, None))
        with pytest.raises(ServerError, match=r"this consumer has left its batches untaken for \d+ s"):
            second.receive(Bye)


@pytest.mark.slow
def test_who_says_nothing_or_half_a_message_is_sent_away(daemon: ServedDaemon):
    silent, slow, waiting = daemon.connect(), daemon.subscribe(), daemon.connect()
    slow.socket.sendall(b"\x94")
    waiting.hello()
    garbled = daemon.connect()
    garbled.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    refused(garbled, ServerError, "no message of loaderd")
    refused(silent, ServerError, "this consumer connected and asked for nothing within 10 s")
    refused(waiting, ServerError, "this consumer connected and asked for nothing within 10 s")
    refused(slow, ServerError, "a message was begun and not finished for 10 s")


# ------------------------------------------------------------------------------------------- its supervisor


@pytest.mark.slow
def test_what_cannot_be_served_is_told_the_supervisor(write_numbered: Write, tmp_path: Path):
    write_numbered([50])
    for names, match in [
        (("number",), "limited:number must be a loaderd.Dataset, Mix or Concat, got int\n" + _SETS),
        (("other",), "cannot serve limited:other: module 'limited' has no attribute 'other'\n" + _SETS),
        (("train", "train"), "two data sets have the name 'train'"),
    ]:
        source = MODULE % {"folder": tmp_path}
        with pytest.raises(ServerError, match=match), serve(tmp_path, "limited", source, *names):
            pass


@pytest.mark.slow
def test_who_joins_a_group_in_a_daemon_that_is_drained_goes_to_the_next_one(daemon: ServedDaemon):
    """Else it would be alone in the old one, and the others in the new one."""
    late, alone = daemon.connect(), daemon.connect()
    late.hello()
    alone.hello()
    daemon.supervisor.send(Drain())
    assert daemon.report()["draining"]
    late.send(Subscribe(Subscription(10, sharing="mirrored", consumers=2).to_wire(), None))
    assert goodbye(late) == "it was reloaded"
    alone.send(Subscribe(Subscription(10).to_wire(), None))
    alone.receive(Opened)


def test_it_ends_with_its_supervisor(daemon: ServedDaemon):
    consumer = daemon.subscribe()
    daemon.supervisor.close()
    assert goodbye(consumer) == "its supervisor is gone"
    assert daemon.process.wait(60) == -9  # SIGKILL, with all that it has started


def test_who_waits_for_whom(daemon: ServedDaemon):
    consumer = daemon.subscribe()
    text = consumer.send(AskState()).receive(State).text
    assert "worker" in text and "consumer" in text
    report = daemon.report()
    sets = {each["name"]: each for each in report["datasets"]}
    assert sets["train"]["state"] == "ready" and sets["train"]["num_records"] == 800
    assert sets["train"]["fields"] == {"bits": "float32 (32,)", "id": "int64 ()"}
    wait_until(
        lambda: any(each["state"].startswith("failed: 1 damaged record") for each in daemon.report()["datasets"])
    )
    assert report["memory_bytes"] > 0 and report["workers"] == 2
