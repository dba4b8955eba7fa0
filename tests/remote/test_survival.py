"""Servers, and the processes that they are made of, are killed, suspended, added and taken away: nobody notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import loaderd
import loaderd.testing
from loaderd.client.discovery import Discovery
from loaderd.errors import OptionError, ServerError, WorkerError
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.source import Settings
from loaderd.remote.tables import table_from_wire
from loaderd.remote.tickets import RowsTicket
from tests.helpers.own_processes import DAEMON, children_of
from tests.helpers.serving import wait_until
from tests.remote.network_server import MODULE, NetworkServer

EPOCHS = 10


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
@pytest.mark.parametrize("victim", ["processes of the server", "the server", *OWN])
def test_a_process_is_killed_and_comes_back(start_server, embedded, victim):
    server = start_server()

    def kill():
        if victim == "processes of the server":
            server.kill_processes()
        elif victim == "the server":
            server.restart()
        else:
            (daemon,) = children_of(os.getpid(), DAEMON)
            worker = children_of(children_of(daemon, "loaderd-forks")[0], "loaderd-worker")[0]
            os.kill(daemon if victim == "own daemon" else worker, signal.SIGKILL)

    with connect(server) as loader:
        assert read(loader, 20, kill) == embedded
        assert loader.statistics().daemon_restarts == (victim == "own daemon")
    server.wait_processes()


def test_processes_are_killed_all_the_time_beside_hosts_that_share_an_epoch(start_server):
    """Every record comes once, in the planned order."""
    servers = [start_server(), start_server()]
    over, rng = threading.Event(), random.Random(3)

    def disturb():
        while not over.wait(0.2):
            if pids := rng.choice(servers).server.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)

    planned = []
    for host in range(2):
        with loaderd.Loader(servers[0].dataset(), batch_size=64, epochs=4, workers=1, shard=(host, 2)) as loader:
            planned.append([batch["id"].tolist() for batch in loader])
    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        for host in range(2):
            with connect(*servers, shard=(host, 2), epochs=4) as loader:
                assert [batch["id"].tolist() for batch in loader] == planned[host]
    finally:
        over.set()
        disturbing.join()
    for epoch in range(4):
        size = len(planned[0]) // 4
        ids = [number for host in planned for batch in host[epoch * size : (epoch + 1) * size] for number in batch]
        assert sorted(ids) == list(range(1000))


@pytest.mark.slow
def test_that_no_server_answers_is_named_and_logged(start_server, caplog):
    """It was called a slow line, and more servers were advised."""
    server = start_server()
    with connect(server, epochs=None) as loader:
        batches, is_over = iter(loader), threading.Event()

        def take():
            while not is_over.is_set():
                next(batches)

        taker = threading.Thread(target=take)
        taker.start()
        server.close()
        wait_until(lambda: loader.diagnose().verdict == "the servers do not answer")
        wait_until(lambda: any("no answer from the servers for" in message for message in caplog.messages))
        found = loader.diagnose()
        server.start()
        wait_until(lambda: any("answers come from the servers again" in message for message in caplog.messages))
        is_over.set()
        taker.join()
    assert (found.gain, found.limiting_stage) == (1.0, "") and "Check that they run" in found.advice
    assert found.outage_s >= 3 and found.failed_requests and f"127.0.0.1:{server.port}" in found.last_error


@pytest.mark.slow
def test_a_server_that_stands_still_costs_a_while(start_server, embedded):
    servers = [start_server(), start_server()]

    def suspend():
        for pid in servers[0].server.family():
            os.kill(pid, signal.SIGSTOP)

    with connect(*servers) as loader:
        assert read(loader, 20, suspend) == embedded
    servers[0].close()


@pytest.mark.slow
def test_an_address_function_that_fails_is_asked_again(server, start_server, monkeypatch, caplog):
    monkeypatch.setattr("loaderd.client.discovery._ASK_AGAIN_S", 0.0)
    servers, asked = [server, start_server()], []

    def find():
        asked.append(None)
        if len(asked) in (2, 7):
            raise OSError("the registry does not answer right now")
        if len(asked) in (3, 4):
            return [b"http://trainer7:8471", "trainer7:8471"][len(asked) - 3 :]
        return [server.address for server in servers[: 1 + (len(asked) > 7)]]

    with loaderd.connect(find, "train", batch_size=64, epochs=None, workers=1) as loader:
        batches = iter(loader)
        wait_until(lambda: next(batches) and servers[1].records_sent() > 0)
    first, second = (record.message for record in caplog.records if "function given as address" in record.message)
    assert first == second and "OSError: the registry does not answer right now" in first


def test_an_address_function_that_exits_is_asked_again(monkeypatch):
    monkeypatch.setattr("loaderd.client.discovery._ASK_AGAIN_S", 0.0)
    asked = []

    def find():
        asked.append(None)
        if len(asked) == 1:
            sys.exit("the registry's client has given up")
        return ["http://trainer:8471"]

    discovery = Discovery(find)
    wait_until(lambda: discovery.news() == ("http://trainer:8471",))
    assert len(asked) == 2


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
def test_a_program_ends_while_an_address_function_is_asked(server):
    found = subprocess.run(
        [sys.executable, "-c", ASKING, server.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "a fork ends\nits parent ends\n", "")


@pytest.mark.slow
def test_no_server_comes_back(start_server):
    """It is an error that names them, and no record is taken for lost: a later call goes on with the same batch."""
    server = start_server()
    with connect(server, reconnect_timeout=1.0, epochs=None) as loader:
        batches = iter(loader)
        next(batches)
        server.close()
        with pytest.raises(ServerError, match="no server has answered for 1 s") as caught:
            for number, _ in enumerate(batches):  # noqa: B007
                pass
        assert "same iterator again (next)" in caught.value.hint
        assert "load_state_dict(loader.state_dict())" in caught.value.hint
        position = loader.position
        assert loader.statistics().records_skipped == 0
        server.start()
        found = None
        while found is None:  # what was being tried may fail once more
            with contextlib.suppress(ServerError):
                found = next(batches)["id"].tolist()
    with connect(server, epochs=None, start=position) as loader:
        assert next(iter(loader))["id"].tolist() == found


@pytest.mark.one_variant
@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record"])
def test_a_record_that_kills_a_process_costs_itself_alone(start_server, on_corrupt):
    """Or its batch. It is named, as it is by workers that die of it."""
    deadly = "lambda id: 2 * id if 345 not in id else __import__('os')._exit(1)"
    module = MODULE.replace("lambda id: 2 * id", deadly)
    module = module.replace("block_records=16)", f"block_records=16), on_corrupt={on_corrupt!r}")
    server, found, errors = start_server(module=module), [], []
    with connect(server, epochs=1, batch_size=10) as loader:
        batches = iter(loader)
        while (batch := next_or_error(batches)) is not None:
            if isinstance(batch, WorkerError):
                errors.append(batch)
            else:
                assert (batch["twice"] == 2 * batch["id"]).all()
                found += batch["id"].tolist()
        assert len(loader.statistics().damages) == 1
    assert 345 not in found and len(set(found)) == len(found) == (990 if on_corrupt == "raise" else 999)
    assert len(errors) == (on_corrupt == "raise")


LARGE = """
def made(id):
    if 5 in id:
        os._exit(1)
    return np.zeros((len(id), 1_500_000), np.uint8)
"""


@pytest.mark.one_variant
def test_a_record_beside_one_that_kills_processes_is_not_lost(start_server):
    """Each ticket is for one row, as all are of such rows. The deadly one is lost, whatever epoch it is asked for."""
    derived = 'loaderd.Derived(made, inputs=("id",), dtype="uint8", shape=(1_500_000,))'
    sound = 'loaderd.Derived(lambda id: 2 * id, inputs=("id",), dtype="int64", shape=())'
    server = start_server(module="import os\nimport numpy as np\n" + LARGE + MODULE.replace(sound, derived))
    table = table_from_wire(Calls(server.address, Settings()).table("train", None, {}, 10.0), "here")
    over, epochs, lost = threading.Event(), itertools.count(1), threading.Event()

    def ask(epoch, record):
        ticket = RowsTicket(table.digest, np.array([[epoch, 0, record, record + 1]]))
        try:
            return Calls(server.address, Settings()).rows("train", ticket, table.schema.row_bytes, 10.0)[1]
        except OutOfReach:
            return None

    def ask_for_the_deadly_one():
        while not over.is_set():
            if ask(next(epochs), 5):
                lost.set()

    askers = [threading.Thread(target=ask_for_the_deadly_one) for _ in range(3)]
    for asker in askers:
        asker.start()
    until_s = time.monotonic() + 60
    try:
        while time.monotonic() < until_s and not lost.is_set():
            assert not ask(0, 0), "a sound record is lost"
    finally:
        over.set()
        for asker in askers:
            asker.join()
    assert lost.is_set()


@pytest.mark.slow
@pytest.mark.one_variant
def test_processes_whose_rows_hang_blame_no_record(start_server, tmp_path):
    """Storage may hang: processes are replaced, one after another, until it does not."""
    path = f"pathlib.Path({str(tmp_path / 'hangs')!r})"
    hangs = f"lambda id: (345 in id and {path}.exists() and time.sleep(1000), 2 * id)[1]"
    module = "import time, loaderd.serve.app\nloaderd.serve.app._STUCK_S = 0.5\n" + MODULE
    server, found = start_server(module=module.replace("lambda id: 2 * id", hangs)), []
    (tmp_path / "hangs").touch()

    def heal():
        for _ in range(6):
            server.server.wait_line("ended with status 70")
        (tmp_path / "hangs").unlink()

    healing = threading.Thread(target=heal)
    healing.start()
    with connect(server, epochs=1) as loader:
        for batch in loader:
            found += batch["id"].tolist()
        assert not loader.statistics().damages
    healing.join()
    assert sorted(found) == list(range(1000))


def test_a_request_that_takes_too_long_is_halved(start_server):
    """Until it takes less; it was asked again for ever."""
    slow = "lambda id: (__import__('time').sleep(0.004 * len(id)), 2 * id)[1]"
    module = MODULE.replace("lambda id: 2 * id", slow)
    server = start_server(module=module + "\nimport loaderd.serve.app\nloaderd.serve.app._MAKE_LIMIT_S = 0.5\n")
    with connect(server, epochs=1, reconnect_timeout=30) as loader:
        assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(1000))


def test_storage_that_is_away_makes_no_request_too_large(start_server, tmp_path):
    """Fewer rows would wait as long for it."""
    failing = f"""
import errno, os, loaderd.serve.app
loaderd.serve.app._MAKE_LIMIT_S = 2.5
read = os.preadv
def preadv(*arguments):
    if os.path.exists({str(tmp_path / "trouble")!r}):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(*arguments)
os.preadv = preadv
"""
    server = start_server(module=MODULE + failing)
    calls = Calls(server.address, Settings())
    table = table_from_wire(calls.table("train", None, {}, 10.0), "here")
    ticket = RowsTicket(table.digest, np.array([[0, 0, 0, 10]]))
    (tmp_path / "trouble").touch()
    with pytest.raises(OutOfReach, match="storage"):
        calls.rows("train", ticket, table.schema.row_bytes, 20.0)
    (tmp_path / "trouble").unlink()
    assert len(calls.rows("train", ticket, table.schema.row_bytes, 20.0)[0]) == 10


def test_threads_that_cannot_be_started_are_tried_again(start_server):
    """The first ones that open the data set, and the first ones that make rows."""
    lacking = """
import loaderd.serve.http_server
from concurrent.futures import ThreadPoolExecutor
loaderd.serve.http_server._FIRST_RETRY_S = 0.1
submit, failed = ThreadPoolExecutor.submit, set()
def first_fails(self, *arguments, **options):
    if self._thread_name_prefix in ("open", "rows") and self._thread_name_prefix not in failed:
        failed.add(self._thread_name_prefix)
        raise RuntimeError("can't start new thread")
    return submit(self, *arguments, **options)
ThreadPoolExecutor.submit = first_fails
"""
    server = start_server(module=MODULE + lacking)
    server.server.wait_line("data set train: RuntimeError: can't start new thread")
    with connect(server, epochs=1) as loader:
        assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(1000))
    server.server.wait_line("a request failed: ")


def test_answers_that_nobody_reads_fill_a_server(tmp_path):
    """It says so to others, and keeps no more of them in memory."""
    # A row that is larger than what the kernel keeps of an answer.
    loaderd.testing.write_shards(tmp_path / "shards", {"bits": np.zeros((2, 16_000_000), np.uint8)})
    module = """
import pathlib, loaderd, loaderd.serve.app
loaderd.serve.app._MOST_UNSENT_BYTES = 500_000
schema = loaderd.Schema({"bits": loaderd.Raw("uint8", (16_000_000,))}, {"bits": loaderd.Array("bits")})
train = loaderd.Dataset(str(pathlib.Path(__file__).parent / "shards" / "*"), schema)
"""
    server = NetworkServer(tmp_path, module=module)
    try:
        calls = Calls(server.address, Settings())
        table = table_from_wire(calls.table("train", None, {}, 10.0), "here")
        ticket = RowsTicket(table.digest, np.array([[0, 0, 0, 1]]))
        body = ticket.encode()
        head = "POST /v1/train/rows HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
        asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

        def is_full() -> bool:
            try:
                Calls(server.address, Settings()).rows("train", ticket, table.schema.row_bytes, 10.0)
            except OutOfReach as error:
                return "the server is full" in str(error)
            return False

        with contextlib.ExitStack() as idle:
            for _ in range(12):
                sock = idle.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", server.port))
                sock.sendall(asked)
            wait_until(is_full)  # one of its two processes may have them all
        wait_until(lambda: not is_full())
    finally:
        server.close()


def next_or_error(batches):
    try:
        return next(batches, None)
    except WorkerError as error:
        return error


@pytest.mark.slow
def test_other_data_are_refused(start_server, tmp_path, write_numbered_to):
    """A server at the same address that has other shards is not believed."""
    one = start_server()
    write_numbered_to(tmp_path / "other" / "shards", [500])
    with connect(one, epochs=None) as loader:
        batches = iter(loader)
        next(batches)
        one.close()
        other = NetworkServer(tmp_path / "other", "--listen", f"127.0.0.1:{one.port}")
        try:
            with pytest.raises(ServerError, match="shards that the consumer began with are gone"):
                for _ in batches:
                    pass
        finally:
            other.close()


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
def test_a_resume_waits_for_the_server_that_has_its_data(tmp_path, write_numbered_to, caplog, grows):
    """While the others have new data already, as in a rolling update."""
    module = MODULE.replace("=16))", "=16), refresh='epoch')") if grows else MODULE
    servers, over = [], threading.Event()
    for name, sizes in (("old", [300, 400, 300]), ("new", [300, 400, 500])):
        write_numbered_to(tmp_path / name / "shards", sizes)
        servers.append(NetworkServer(tmp_path / name, module=module))
    old, new = servers

    def come_back():
        wait_until(lambda: over.is_set() or "belongs to other data" in caplog.text)
        old.start()

    coming_back = threading.Thread(target=come_back)
    try:
        with connect(old, epochs=1) as loader:
            batches = iter(loader)
            next(batches)
            position = loader.position
            expected = [batch["id"].tolist() for batch in batches]
        with pytest.raises(OptionError, match="the position belongs to other data"):
            connect(new, start=position)
        old.close()
        coming_back.start()
        with connect(old, new, epochs=1, start=position) as loader:
            assert [batch["id"].tolist() for batch in loader] == expected
    finally:
        over.set()
        if coming_back.ident:
            coming_back.join()
        for server in servers:
            server.close()
