"""How many calls wait for a maker, and when the first one may come."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

import loaderd
from loaderd.errors import WorkerError
from loaderd.gateway import makers
from loaderd.gateway.answers import NotReady
from loaderd.gateway.maker import Maker
from loaderd.gateway.makers import calls_per_maker
from loaderd.ipc.messages import Make
from loaderd.remote.tickets import REMOTE_PROTOCOL, RowsTicket, TableRequest, to_json
from loaderd.shm.anonymous import SharedMemory
from tests.helpers.serving import wait_until
from tests.remote import network_server
from tests.remote.network_server import SETTINGS, NetworkServer


@pytest.mark.parametrize(("took_s", "calls"), [(0.0, 32), (0.002, 32), (0.02, 12), (0.06, 4), (30.0, 4)])
def test_as_many_as_have_their_turn_soon(took_s: float, calls: int):
    assert calls_per_maker(took_s) == calls


Started = list[tuple[subprocess.Popen[bytes], socket.socket]]


def start_others(monkeypatch: pytest.MonkeyPatch, *command: str, says: bool) -> Started:
    """Have makers be processes of ``command``, without a channel unless ``says``; returns those that were started."""
    started: Started = []

    def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        if not says:
            theirs.close()
        started.append((subprocess.Popen(command), theirs))
        return started[-1][0], ours

    monkeypatch.setattr(makers, "start_process", start)
    return started


def test_a_maker_that_dies_before_its_first_message_is_replaced(monkeypatch: pytest.MonkeyPatch):
    dead = start_others(monkeypatch, "true", says=False)
    some = makers.Makers(1, {}, SharedMemory.create("answers", 1 << 12))
    for number in range(2):  # the first is replaced at the second call
        with pytest.raises(NotReady, match="ask again"):
            some.make(Make(b"%d" % number, 0))
    assert [process.returncode for process, _ in dead] == [0, 0], "nobody has waited for it"
    assert some.restarts == 2


def test_silence_is_no_death(monkeypatch: pytest.MonkeyPatch):
    """The storage of a ticket's records may hang for long: nothing is wrong with the records."""
    monkeypatch.setattr(makers, "_LIMIT_S", 0.02)
    silent = start_others(monkeypatch, "sleep", "600", says=True)
    some = makers.Makers(1, {}, SharedMemory.create("answers", 1 << 12))
    for _ in range(5):
        with pytest.raises(NotReady, match=r"said nothing for 0.02 s.*ask again"):
            some.make(Make(b"a ticket", 0))
    assert [process.returncode for process, _ in silent] == [-signal.SIGKILL] * 5
    for _, theirs in silent:
        theirs.close()


class Unkillable(subprocess.Popen[bytes]):
    """As a process that waits in the kernel for a mount that hangs: SIGKILL ends it only when the mount is back."""

    mount_is_back = threading.Event()

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        if not self.mount_is_back.wait(timeout):
            raise subprocess.TimeoutExpired("a maker", timeout or 0.0)
        super().kill()
        return super().wait(timeout)


def test_a_maker_that_cannot_be_ended_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(makers, "_LIMIT_S", 0.02)
    monkeypatch.setattr(makers, "_END_S", 0.1, raising=False)
    started: list[Unkillable] = []
    channels: list[socket.socket] = []

    def start(module: str) -> tuple[Unkillable, socket.socket]:
        ours, theirs = socket.socketpair()
        channels.append(theirs)
        started.append(Unkillable(["sleep", "600"]))
        return started[-1], ours

    monkeypatch.setattr(makers, "start_process", start)
    some = makers.Makers(1, {}, SharedMemory.create("answers", 1 << 12))
    late = threading.Timer(10.0, Unkillable.mount_is_back.set)
    late.start()
    for _ in range(2):
        with pytest.raises(NotReady, match="said nothing"):
            some.make(Make(b"a ticket", 0))
    assert not Unkillable.mount_is_back.is_set(), "it was waited for"
    late.cancel()
    Unkillable.mount_is_back.set()
    for process in started:
        wait_until(lambda process=process: process.returncode is not None)
    for each in channels:
        each.close()


def test_deaths_of_a_ticket_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """What they died of, such as too little memory, may be over."""
    now_s = [1000.0]
    monkeypatch.setattr("loaderd.gateway.makers.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    start_others(monkeypatch, "true", says=False)
    some = makers.Makers(1, {}, SharedMemory.create("answers", 1 << 12))
    for began in (0, 20):
        for minute in (0, 4, 8):  # rows that take long are remembered as others are
            now_s[0] = 1000.0 + 60 * (began + minute)
            with pytest.raises(NotReady, match="ask again"):
                some.make(Make(b"a ticket", 0))
        with pytest.raises(WorkerError, match="3 processes of the server died"):
            some.make(Make(b"a ticket", 0))


def started_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer], limit_s: float
) -> tuple[makers.Makers, str]:
    """A maker that may be silent for so long, for the server's data set; and the digest of that."""
    settings = {**SETTINGS, "unix": start_server().unix_address.removeprefix("unix://")}
    monkeypatch.setattr(makers, "_LIMIT_S", limit_s)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    some = makers.Makers(1, settings, SharedMemory.create("answers", 1 << 20))
    table = msgpack.unpackb(some.make(Make(to_json(TableRequest("train")), -1)).table)
    return some, table["digest"]


def end(some: makers.Makers) -> None:
    idle = some._idle.get()
    assert idle is not None
    idle.end()


# Its files fail with EIO while there is a file "away" beside them.
OF_A_MOUNT = """
import errno
from pathlib import Path

import loaderd


class Mount:
    protocol = "mount"

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("mount://")

    def info(self, path):
        at = Path("/", path)
        kind = "directory" if at.is_dir() else "file"
        return {"name": path, "size": at.stat().st_size, "type": kind, "mtime": at.stat().st_mtime}

    isdir = lambda self, path: Path("/", path).is_dir()
    isfile = lambda self, path: Path("/", path).is_file()

    def open(self, path, mode):
        if Path("/", path).with_name("away").exists():
            raise OSError(errno.EIO, "the mount is away")
        return Path("/", path).open("rb")


schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
shards = "mount:/" + str(Path(__file__).parent / "shards" / "000.tfrecord")
train = loaderd.Dataset(shards, schema, storage=loaderd.Storage(filesystem=Mount(), retry_s=60.0))
"""


@pytest.mark.slow
def test_a_maker_whose_storage_is_asked_again_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer]
):
    """However large ``Storage.retry_s`` is."""
    monkeypatch.setattr(network_server, "MODULE", OF_A_MOUNT)
    some, digest = started_here(monkeypatch, tmp_path, start_server, limit_s=3.0)
    ticket = to_json(RowsTicket("train", digest, ((0, 0, 0, 100),)))
    away = tmp_path / "shards" / "away"
    away.touch()
    mended = threading.Timer(6.0, away.unlink)
    mended.start()
    assert some.make(Make(ticket, 0)).num_rows == 100
    assert some.restarts == 0 and not away.exists()
    mended.join()
    end(some)


SLOW = """
import time

def twice(id):
    time.sleep(0.02 * len(id))
    return 2 * id

schema ="""


@pytest.mark.slow
def test_a_maker_of_slow_rows_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer]
):
    """However long all of them take."""
    module = network_server.MODULE.replace("lambda id: 2 * id", "twice").replace("schema =", SLOW)
    monkeypatch.setattr(network_server, "MODULE", module)
    some, digest = started_here(monkeypatch, tmp_path, start_server, limit_s=3.0)
    rows = tuple((0, block, 0, 16) for block in range(15))
    assert some.make(Make(to_json(RowsTicket("train", digest, rows)), 0)).num_rows == 240
    assert some.restarts == 0
    end(some)


def test_where_too_many_rows_kill_makers_the_request_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer]
):
    monkeypatch.setattr(
        network_server, "MODULE", network_server.MODULE.replace("2 * id", "__import__('os')._exit(1)")
    )
    monkeypatch.setattr(makers, "_MOST_DEATHS", 5)
    some, digest = started_here(monkeypatch, tmp_path, start_server, limit_s=60.0)
    ticket = to_json(RowsTicket("train", digest, ((0, 0, 0, 2),)))
    with pytest.raises(NotReady, match="has ended"):
        some.make(Make(ticket, 0))
    with pytest.raises(WorkerError, match="5 processes of the server died while they made these rows"):
        some.make(Make(ticket, 0))
    assert some.restarts == 5


@pytest.mark.slow
def test_others_are_served_while_rows_are_looked_for_that_kill_makers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer]
):
    monkeypatch.setattr(
        network_server, "MODULE", network_server.MODULE.replace("2 * id", "__import__('os')._exit(1)")
    )
    some, digest = started_here(monkeypatch, tmp_path, start_server, limit_s=60.0)
    deadly, asked = Make(to_json(RowsTicket("train", digest, ((0, 0, 0, 16),))), 0), threading.Event()
    monkeypatch.setattr(makers, "_SEARCH_S", 0.5)

    def search() -> None:
        while not asked.is_set():
            with contextlib.suppress(NotReady):
                some.make(deadly)

    searching = threading.Thread(target=search)
    searching.start()
    try:
        wait_until(lambda: some.restarts >= 2)
        assert some.make(Make(to_json(TableRequest("train")), -1)).table
        assert some.restarts < 10, "there were still rows to look for"
    finally:
        asked.set()
        searching.join()


@pytest.mark.slow
def test_rows_of_shards_that_a_new_daemon_cannot_list_are_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_server: Callable[..., NetworkServer]
):
    """Who asks for rows had these data: no record of them is lost. Who asks what there is, is told that."""
    server, shards, away = start_server(), tmp_path / "shards", tmp_path / "away"

    def restarted(until_it_has: str) -> Maker:
        server.daemon.kill()
        server.daemon.wait()
        server.start_daemon()
        new = Maker(server.unix_address, SharedMemory.create("answers", 1 << 20))
        wait_until(lambda: bool(getattr(new.answer(asked), until_it_has)))
        return new

    asked = Make(to_json(TableRequest("train")), -1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    maker = Maker(server.unix_address, SharedMemory.create("answers", 1 << 20))
    wait_until(lambda: bool(maker.answer(asked).table))
    digest = msgpack.unpackb(maker.answer(asked).table)["digest"]
    ticket = Make(to_json(RowsTicket("train", digest, ((0, 0, 0, 10),))), 0)
    shards.rename(away)
    maker = restarted("error")
    made = maker.answer(ticket)
    assert made.error is None and made.why_not.endswith("*.tfrecord matches no file")
    away.rename(shards)
    restarted("table")
    assert maker.answer(ticket).num_rows == 10, "the failure was kept"


@pytest.mark.parametrize("protocol", [REMOTE_PROTOCOL + 1, "1", None])
def test_consumers_of_another_protocol_are_refused(protocol: object):
    request = json.dumps({"dataset": "train", "protocol": protocol}).encode()
    made = Maker("unix:///nowhere.sock", SharedMemory.create("answers", 1 << 12)).answer(Make(request, -1))
    assert made.error is not None
    assert f"speaks network protocol {REMOTE_PROTOCOL}; the consumer speaks {protocol!r}" in made.error.message


_STARTING = """
import json, os, socket, sys
from loaderd.gateway import flight
from loaderd.gateway.tally import Tally

settings = json.loads(sys.argv[1])
called = []
makers = flight.Makers

def call_first(*arguments):
    with socket.socket() as caller:
        called.append(caller.connect_ex((settings["host"], settings["port"])))
    return makers(*arguments)

flight.Makers = call_first
flight.GatewayServer(settings, Tally())
with socket.socket() as caller:
    called.append(caller.connect_ex((settings["host"], settings["port"])))
print(called, flush=True)
os._exit(0)
"""


def test_a_gateway_listens_when_it_has_makers(tmp_path: Path):
    """A consumer may have waited for it, and calls at once."""
    host = "127.0.0.77"  # where nobody else takes the port
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    settings = {**SETTINGS, "host": host, "port": port, "unix": str(tmp_path / "none.sock"), "makers": 1}
    command = [sys.executable, "-c", _STARTING, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"[{errno.ECONNREFUSED}, 0]\n", done.stderr


@pytest.mark.slow
def test_a_maker_that_replaces_another_has_as_much_memory(start_server: Callable[..., NetworkServer]):
    """The gateway bounds its own, and what it starts later inherits that."""
    server = start_server(makers=1)

    def maker() -> tuple[int, str]:
        wait_until(lambda: len(server.makers()) == 1)
        (pid,) = server.makers()
        return pid, next(line for line in Path(f"/proc/{pid}/limits").open() if line.startswith("Max data size"))

    first, before = maker()
    os.kill(first, signal.SIGKILL)
    with loaderd.connect(server.address, "train", batch_size=100) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 1000
    second, after = maker()
    assert first != second and before == after
