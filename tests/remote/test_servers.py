"""How long a server is left alone that has not answered, and which refusals end a call."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from loaderd.errors import (
    LoaderdError,
    NoShardsError,
    OptionError,
    ServerError,
    ShardReadError,
    StorageError,
    WorkerError,
)
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.servers import Lacking, Servers
from loaderd.remote.source import Settings


def test_the_only_server_is_asked_again_at_once_after_a_long_attempt():
    """Where there are others, a server is set aside for some times the attempt that failed, here for 4 s or more."""
    lost_s = 2.0
    asked_s: list[float] = []

    def call(calls: Calls, timeout_s: float) -> str:
        asked_s.append(time.monotonic())
        if len(asked_s) % 2 == 1:
            time.sleep(lost_s)
            asked_s[-1] = time.monotonic()
            raise OutOfReach("it stalls")
        return "an answer"

    for _ in range(3):  # this process may be the one that stalls, but not each time
        asked_s.clear()
        servers = Servers(("http://127.0.0.1:9",), Settings(), lambda text: None)
        assert servers.ask(call, 60.0) == "an answer"
        if asked_s[1] - asked_s[0] < lost_s:
            break
    assert len(asked_s) == 2 and asked_s[1] - asked_s[0] < lost_s


def test_an_old_refusal_is_forgotten_when_the_server_is_away(monkeypatch: pytest.MonkeyPatch):
    """The only server refuses, then restarts, and then answers."""
    monkeypatch.setattr("loaderd.remote.servers._REFUSED_S", 0.0)
    answers: list[Exception | str] = [ServerError("it refuses the token"), OutOfReach("it restarts"), "an answer"]

    def call(calls: Calls, timeout_s: float) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    servers = Servers(("http://127.0.0.1:9",), Settings(), lambda text: None)
    with pytest.raises(ServerError, match="refuses the token"):
        servers.ask(call, 60.0)
    assert servers.ask(call, 60.0) == "an answer"


@pytest.mark.parametrize("one_answers", [True, False])
def test_all_servers_are_asked_before_refusals_end_a_call(monkeypatch: pytest.MonkeyPatch, one_answers: bool):
    monkeypatch.setattr("loaderd.remote.servers._REFUSED_S", 600.0)
    addresses = tuple(f"http://127.0.0.1:{port}" for port in range(1, 20))
    asked: list[str] = []

    def call(calls: Calls, timeout_s: float) -> str:
        assert calls.address not in asked
        asked.append(calls.address)
        if one_answers and len(asked) == len(addresses):
            return "an answer"
        raise ServerError("it refuses the token")

    servers = Servers(addresses, Settings(), lambda text: None)
    if one_answers:
        assert servers.ask(call, 60.0) == "an answer"
    else:
        with pytest.raises(ServerError, match="refuses the token"):
            servers.ask(call, 60.0)
    assert sorted(asked) == sorted(addresses)


HERE, THERE = "http://127.0.0.1:9", "http://127.0.0.1:10"


@pytest.mark.parametrize(
    "error", [StorageError("EIO"), WorkerError("it dies"), NoShardsError("gone"), Lacking("half")]
)
def test_what_is_wrong_with_one_server_is_asked_of_another(error: LoaderdError | Lacking):
    """And from then on, the other one is asked first; the user hears that once."""
    asked: Counter[str] = Counter()
    heard: list[str] = []

    def call(calls: Calls, timeout_s: float) -> str:
        asked[calls.address] += 1
        if calls.address == HERE:
            raise error
        return "an answer"

    servers = Servers((HERE, THERE), Settings(), heard.append)
    assert [servers.ask(call, 60.0) for _ in range(50)] == 50 * ["an answer"]
    assert (asked[HERE], asked[THERE]) == (1, 50)
    assert len(heard) == 1 and f"the server at {HERE}: {error}" in heard[0]


def test_two_servers_that_each_lack_something_else_cost_no_wait():
    """Each is asked although it has just lacked what the other one had."""
    servers = Servers((HERE, THERE), Settings(), lambda text: None)

    def answer_of(address: str) -> str:
        def call(calls: Calls, timeout_s: float) -> str:
            if calls.address != address:
                raise Lacking("half")
            return "an answer"

        return servers.ask(call, 60.0)

    began_s = time.monotonic()
    assert [answer_of(address) for address in 4 * (HERE, THERE)] == 8 * ["an answer"]
    assert time.monotonic() - began_s < 4.0


def test_a_server_of_another_version_ends_nothing():
    """In a rolling upgrade, the others still answer; if none does, its sentence is raised."""

    def call(calls: Calls, timeout_s: float) -> str:
        if calls.address == HERE:
            raise OptionError("this server speaks protocol 3, and the consumer 2")
        return "an answer"

    servers = Servers((HERE, THERE), Settings(), lambda text: None)
    assert [servers.ask(call, 60.0) for _ in range(20)] == 20 * ["an answer"]
    with pytest.raises(OptionError, match="protocol 3"):
        Servers((HERE,), Settings(), lambda text: None).ask(call, 60.0)


@pytest.mark.parametrize(
    ("errors", "chief"),
    [
        ([StorageError("EIO"), WorkerError("it dies")], StorageError),
        ([StorageError("EIO"), Lacking("half an answer")], StorageError),
        ([NoShardsError("gone"), NoShardsError("gone")], NoShardsError),
        ([WorkerError("it dies"), ServerError("other data")], WorkerError),
        ([WorkerError("it dies"), Lacking("half an answer")], None),
    ],
)
def test_if_all_servers_fail_no_record_is_lost_that_storage_has(
    errors: list[LoaderdError | Lacking], chief: type[LoaderdError] | None
):
    for each in (errors, errors[::-1]):
        asked: list[str] = []

        def call(calls: Calls, timeout_s: float, each: list[LoaderdError | Lacking] = each) -> str:
            asked.append(calls.address)  # noqa: B023
            raise each[calls.address == THERE]

        servers = Servers((HERE, THERE), Settings(), lambda text: None)
        if chief is None:
            assert servers.ask(call, 60.0) == "half an answer"
        else:
            with pytest.raises(chief):
                servers.ask(call, 60.0)
        assert sorted(asked) == sorted((HERE, THERE))


def test_no_record_is_lost_while_a_server_is_away():
    """Which may have it."""

    def call(calls: Calls, timeout_s: float) -> str:
        if calls.address == HERE:
            raise ShardReadError("the file is gone")
        raise OutOfReach("it restarts")

    servers = Servers((HERE, THERE), Settings(), lambda text: None)
    with pytest.raises(ServerError, match=r"no server has answered for 0\.5 s"):
        servers.ask(call, 0.5)


def test_servers_that_answer_other_calls_are_not_away():
    """Where rows are slow to make, a call may wait for long until it is its turn."""
    busy = [True] * 10

    def call(calls: Calls, timeout_s: float) -> str:
        servers.ask(lambda calls, timeout_s: "an answer to another call", 0.2)
        if busy:
            busy.pop()
            raise OutOfReach("it makes other rows first")
        return "an answer"

    servers = Servers((HERE,), Settings(), lambda text: None)
    assert servers.ask(call, 0.2) == "an answer"


def test_not_all_of_many_servers_are_asked_for_a_record_that_kills_makers():
    asked: list[str] = []

    def call(calls: Calls, timeout_s: float) -> str:
        asked.append(calls.address)
        raise WorkerError("3 processes of the server died")

    servers = Servers(tuple(f"http://127.0.0.1:{port}" for port in range(1, 21)), Settings(), lambda text: None)
    with pytest.raises(WorkerError, match="3 processes"):
        servers.ask(call, 60.0)
    assert len(set(asked)) == len(asked) == 8
