"""Servers, and the processes that they are made of, are killed, suspended, added and taken away: nobody notices."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading

import pytest

import loaderd
from loaderd.errors import OptionError, ServerError, WorkerError
from tests.helpers.own_processes import DAEMON, children_of, wait_for_no_daemon
from tests.helpers.serving import wait_until
from tests.remote import network_server
from tests.remote.network_server import MODULE, NetworkServer, descendants

EPOCHS = 10


@pytest.fixture(scope="module")
def expected(start_shared_server, lent_before):
    lent_before.append(start_shared_server())
    with loaderd.Loader(lent_before[0].dataset(), batch_size=64, epochs=EPOCHS, workers=1) as loader:
        return [batch["id"].tolist() for batch in loader]


def connect(*servers, **options):
    options = {"batch_size": 64, "epochs": EPOCHS, "workers": 2, **options}
    return loaderd.connect([server.address for server in servers], "train", **options)


def read(loader, at, do):
    """The ids of all batches; ``do`` is called when batch number ``at`` was taken."""
    found = []
    for number, batch in enumerate(loader):
        found.append(batch["id"].tolist())
        if number == at:
            do()
    return found


# What a loader starts is killed in the tests of embedded ones, too.
OWN = [pytest.param(victim, marks=pytest.mark.slow) for victim in ("worker", "own daemon")]


@pytest.mark.one_variant
@pytest.mark.parametrize("victim", ["maker", "gateway", "daemon of the server", *OWN])
def test_a_process_is_killed_and_comes_back(borrow_server, expected, victim):
    server = borrow_server()

    def kill():
        if victim == "maker":
            os.kill(server.makers()[0], signal.SIGKILL)
        elif victim == "gateway":
            server.gateway.kill()
            server.gateway.wait()
            server.start_gateway(port=server.port)
        elif victim == "daemon of the server":
            server.daemon.kill()
            server.daemon.wait()
            server.start_daemon()
        else:
            (daemon,) = children_of(os.getpid(), DAEMON)
            os.kill(daemon if victim == "own daemon" else descendants(daemon)[-1], signal.SIGKILL)

    with connect(server) as loader:
        assert read(loader, 20, kill) == expected
        assert loader.statistics().daemon_restarts == (victim == "own daemon")


def test_one_of_two_servers_is_gone_for_good(borrow_server, expected):
    servers = [borrow_server(), borrow_server()]
    with connect(*servers) as loader:
        assert read(loader, 20, servers[0].close) == expected


@pytest.mark.slow
def test_that_no_server_answers_is_named_and_logged(borrow_server, caplog):
    """It was called a slow line, and more servers were advised."""
    server = borrow_server()
    with connect(server, epochs=None) as loader:
        batches, is_over = iter(loader), threading.Event()

        def take():
            while not is_over.is_set():
                next(batches)

        taker = threading.Thread(target=take)
        taker.start()
        server.gateway.kill()
        server.gateway.wait()
        wait_until(lambda: loader.diagnose().verdict == "the servers do not answer")
        wait_until(lambda: any("no answer from the servers for" in message for message in caplog.messages))
        found = loader.diagnose()
        server.start_gateway(port=server.port)
        wait_until(lambda: any("answers come from the servers again" in message for message in caplog.messages))
        is_over.set()
        taker.join()
    assert (found.gain, found.limiting_stage) == (1.0, "") and "Check that they run" in found.advice
    assert found.outage_s >= 3 and found.failed_requests and f"127.0.0.1:{server.port}" in found.last_error


@pytest.mark.slow
def test_a_server_that_stands_still_costs_a_while(borrow_server, expected):
    servers = [borrow_server(), borrow_server()]

    def suspend():
        for pid in [servers[0].gateway.pid, *servers[0].makers()]:
            os.kill(pid, signal.SIGSTOP)

    with connect(*servers) as loader:
        assert read(loader, 20, suspend) == expected
    servers[0].close()


@pytest.mark.slow
def test_servers_come_and_go_all_the_time(borrow_server, expected):
    """One of three is killed each time; it comes back with another port, and the function says so."""
    servers = [borrow_server() for _ in range(3)]
    rng = random.Random(5)
    over = threading.Event()

    def disturb():
        while not over.wait(0.3):
            server = rng.choice(servers)
            server.gateway.kill()
            server.gateway.wait()
            server.start_gateway()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        with loaderd.connect(
            lambda: [server.address for server in servers], "train", batch_size=64, epochs=EPOCHS, workers=2
        ) as loader:
            assert [batch["id"].tolist() for batch in loader] == expected
    finally:
        over.set()
        disturbing.join()


@pytest.mark.slow
def test_a_server_that_is_added_is_used(borrow_server):
    servers = [borrow_server()]
    with loaderd.connect(
        lambda: [server.address for server in servers], "train", batch_size=64, epochs=None, workers=1
    ) as loader:
        batches = iter(loader)
        next(batches)
        servers.append(borrow_server())
        before = servers[1].gateway_report()["remote"]

        def is_used():
            for _ in range(200):
                next(batches)
            return servers[1].gateway_report()["remote"] != before

        wait_until(is_used)


@pytest.mark.slow
def test_an_address_function_that_fails_is_asked_again(borrow_server, monkeypatch, caplog):
    monkeypatch.setattr("loaderd.client.discovery._ASK_AGAIN_S", 0.0)
    servers, asked = [borrow_server(), borrow_server()], []

    def find():
        asked.append(None)
        if len(asked) in (2, 7):
            raise OSError("the registry does not answer right now")
        if len(asked) in (3, 4):
            return [b"grpc://trainer7:8471", "trainer7:8471"][len(asked) - 3 :]
        return [server.address for server in servers[: 1 + (len(asked) > 7)]]

    with loaderd.connect(find, "train", batch_size=64, epochs=None, workers=1) as loader:
        batches, before = iter(loader), servers[1].gateway_report()["remote"]
        wait_until(lambda: next(batches) and servers[1].gateway_report()["remote"] != before)
    first, second = (record.message for record in caplog.records if "function given as address" in record.message)
    assert first == second and "OSError: the registry does not answer right now" in first


@pytest.mark.slow
def test_nobody_waits_for_an_address_function(borrow_server, monkeypatch):
    monkeypatch.setattr("loaderd.client.discovery._ASK_AGAIN_S", 0.0)
    servers, is_asked, may_answer = [borrow_server()], threading.Event(), threading.Event()

    def find():
        if len(servers) > 1:
            is_asked.set()
            may_answer.wait(60)
        return [server.address for server in servers]

    with loaderd.connect(find, "train", batch_size=64, epochs=None, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        servers.append(borrow_server())
        before = servers[1].gateway_report()["remote"]
        wait_until(lambda: next(batches) and is_asked.is_set())
        for _ in range(200):
            next(batches)
        assert not may_answer.is_set() and servers[1].gateway_report()["remote"] == before
        may_answer.set()
        wait_until(lambda: next(batches) and servers[1].gateway_report()["remote"] != before)


ASKING = """
import os, sys, threading, time
import loaderd

is_asked = threading.Event()

def find():
    if threading.current_thread() is not threading.main_thread():
        is_asked.set()
        time.sleep(1000)
    return [sys.argv[1]]

loader = loaderd.connect(find, "train", batch_size=64, epochs=None, workers=1)
batches = iter(loader)
while not is_asked.is_set():
    next(batches)
child = os.fork()
if child:
    os.waitpid(child, 0)
    next(batches)
print("a fork" if child == 0 else "its parent", "ends", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_while_an_address_function_is_asked(borrow_server):
    found = subprocess.run(
        [sys.executable, "-c", ASKING, borrow_server().address],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "a fork ends\nits parent ends\n", "")


@pytest.mark.slow
def test_no_server_comes_back(borrow_server):
    """It is an error that names them, and no record is taken for lost: a later call goes on with the same batch."""
    server = borrow_server()
    with connect(server, reconnect_timeout=1.0, epochs=None) as loader:
        batches = iter(loader)
        next(batches)
        server.gateway.kill()
        server.gateway.wait()
        with pytest.raises(ServerError, match="no server has answered for 1 s") as caught:
            for number, _ in enumerate(batches):  # noqa: B007
                pass
        assert "same iterator again (next)" in caught.value.hint and "seek(loader.position)" in caught.value.hint
        position = loader.position
        assert loader.statistics().records_skipped == 0
        server.start_gateway(port=server.port)
        found = None
        while found is None:  # what was being tried may fail once more
            with contextlib.suppress(ServerError):
                found = next(batches)["id"].tolist()
    with connect(server, epochs=None, start=position) as loader:
        assert next(iter(loader))["id"].tolist() == found


@pytest.mark.one_variant
@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record"])
def test_a_record_that_kills_makers_costs_itself_alone(start_server, monkeypatch, on_corrupt):
    """Or its batch. It is named, as it is by workers that die of it."""
    deadly = "lambda id: 2 * id if 345 not in id else __import__('os')._exit(1)"
    module = network_server.MODULE.replace("lambda id: 2 * id", deadly)
    module = module.replace("block_records=16)", f"block_records=16), on_corrupt={on_corrupt!r}")
    monkeypatch.setattr(network_server, "MODULE", module)
    server, found, errors = start_server(), [], []
    with connect(server, epochs=1, batch_size=10) as loader:
        batches = iter(loader)
        while (batch := next_or_error(batches)) is not None:
            if isinstance(batch, WorkerError):
                errors.append(batch)
            else:
                assert (batch["twice"] == 2 * batch["id"]).all()
                found += batch["id"].tolist()
        (damage,) = loader.statistics().damages
    assert damage.shard.endswith("001.tfrecord") and damage.record == 45
    assert "processes of the server died" in damage.found
    assert 345 not in found and len(set(found)) == len(found) == (990 if on_corrupt == "raise" else 999)
    assert [error.damages for error in errors] == (on_corrupt == "raise") * [(damage,)]


def next_or_error(batches):
    try:
        return next(batches, None)
    except WorkerError as error:
        return error


@pytest.mark.slow
def test_a_server_whose_shards_are_away_counts_as_away(start_server, monkeypatch, tmp_path):
    """It is started anew, and cannot list them: no record is lost, and the error says what the server said."""
    skipping = network_server.MODULE.replace("block_records=16)", 'block_records=16), on_corrupt="skip_record"')
    monkeypatch.setattr(network_server, "MODULE", skipping)
    server, shards, away = start_server(), tmp_path / "shards", tmp_path / "away"

    def restart():
        server.daemon.kill()
        server.daemon.wait()
        server.start_daemon()
        for maker in server.makers():
            os.kill(maker, signal.SIGKILL)

    with connect(server, reconnect_timeout=1.0, epochs=2) as loader:
        batches = iter(loader)
        found = next(batches)["id"].tolist()
        shards.rename(away)
        restart()
        said = ""
        while len(found) < 2000:
            try:
                found += next(batches)["id"].tolist()
            except ServerError as error:  # what was being tried may fail once more
                said += error.message
            if "matches no file" in said and away.exists():
                away.rename(shards)
                restart()
        assert re.search("no server has answered for 1 s; the last attempt: .*tfrecord matches no file", said)
        assert next(batches, None) is None and loader.statistics().records_skipped == 0
        assert sorted(found[:1000]) == sorted(found[1000:]) == list(range(1000))


@pytest.mark.slow
def test_other_data_are_refused(borrow_server, tmp_path, write_numbered_to):
    """A server of the same name that has other shards is not believed."""
    one = borrow_server()
    write_numbered_to(tmp_path / "other" / "shards", [500])
    other = NetworkServer(tmp_path / "other", {})
    try:
        with connect(one, epochs=None) as loader:
            batches = iter(loader)
            next(batches)
            one.gateway.kill()
            one.gateway.wait()
            other.start_gateway(port=one.port)
            with pytest.raises(ServerError, match="other data 'train' than are asked for"):
                for _ in batches:
                    pass
    finally:
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
def test_a_resume_waits_for_the_server_that_has_its_data(tmp_path, write_numbered_to, monkeypatch, caplog, grows):
    """While the others have new data already, as in a rolling update."""
    if grows:
        monkeypatch.setattr("network_server.MODULE", MODULE.replace("=16))", "=16), refresh='epoch')"))
    servers, over = [], threading.Event()
    for name, sizes in (("old", [300, 400, 300]), ("new", [300, 400, 500])):
        write_numbered_to(tmp_path / name / "shards", sizes)
        servers.append(NetworkServer(tmp_path / name, {}))
    old, new = servers

    def come_back():
        wait_until(lambda: over.is_set() or "belongs to other data" in caplog.text)
        old.start_gateway(port=old.port)

    coming_back = threading.Thread(target=come_back)
    try:
        with connect(old, epochs=1) as loader:
            batches = iter(loader)
            next(batches)
            position = loader.position
            expected = [batch["id"].tolist() for batch in batches]
        with pytest.raises(OptionError, match="the position belongs to other data"):
            connect(new, start=position)
        old.gateway.kill()
        old.gateway.wait()
        coming_back.start()
        with connect(old, new, epochs=1, start=position) as loader:
            assert [batch["id"].tolist() for batch in loader] == expected
    finally:
        over.set()
        if coming_back.ident:
            coming_back.join()
        for server in servers:
            server.close()


def test_the_processes_end_with_who_started_them(borrow_server):
    server = borrow_server()
    with connect(server) as loader:
        next(iter(loader))
        wait_until(lambda: len(server.makers()) == 2)  # one will do for the first batch
        makers = [os.pidfd_open(pid) for pid in server.makers()]
    wait_for_no_daemon()
    server.gateway.kill()
    server.gateway.wait()
    for maker in makers:
        wait_until(lambda maker=maker: _has_ended(maker))
        os.close(maker)


def _has_ended(pidfd):
    import select

    return bool(select.select([pidfd], [], [], 0)[0])


@pytest.mark.slow
def test_all_servers_are_replaced_in_the_middle_of_a_load(borrow_server, expected):
    """Those that workers wait for never come back; the function says which there are instead."""
    servers = [borrow_server()]

    def replace():
        servers[0].close()
        servers[0] = borrow_server()

    with loaderd.connect(
        lambda: [server.address for server in servers], "train", batch_size=64, epochs=EPOCHS, workers=2
    ) as loader:
        assert read(loader, 20, replace) == expected
