"""More calls than a gateway has threads for, or memory for their stacks: they come again later, and none fails."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import loaderd
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.servers import Servers
from loaderd.remote.source import Settings
from loaderd.remote.tickets import TABLE, RowsTicket, TableRequest, to_json
from tests.helpers.serving import wait_until
from tests.remote import network_server
from tests.remote.network_server import NetworkServer

CALLS, MOST_CALLS = 60, 16
REQUEST = to_json(TableRequest("train"))
WAITING = """
import time
may_end = pathlib.Path(__file__).with_name("may end")

def twice(id):
    while not may_end.exists():
        time.sleep(0.01)
    return 2 * id

schema ="""
MODULE = network_server.MODULE.replace("lambda id: 2 * id", "twice").replace("schema =", WAITING)


@pytest.fixture(autouse=True)
def large_stacks() -> Iterator[None]:
    """Of threads in processes that are started: with the usual 8 MiB, it would take eight times as many calls."""
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, before)


@pytest.mark.slow
def test_calls_beyond_what_there_may_be_come_again(
    tmp_path: Path, start_server: Callable[..., NetworkServer], monkeypatch: pytest.MonkeyPatch
):
    """Sixty wait for four answers that cannot be made yet. None of them fails, nor does who comes to them."""
    monkeypatch.setattr(network_server, "MODULE", MODULE)
    server = start_server()
    digest = msgpack.unpackb(Calls(server.address, Settings()).act(TABLE, REQUEST, 60.0))["digest"]
    ways = [Calls(server.address, Settings()) for _ in range(16)]
    said: Counter[str] = Counter()

    def call(number: int) -> None:
        ticket = to_json(RowsTicket("train", digest, ((0, number % 4, 0, 16),)))
        try:
            said[f"{len(ways[number % 16].rows(ticket, 120.0)[0])} rows"] += 1
        except Exception as error:
            said[f"{type(error).__name__}: {error}"] += 1

    later = threading.Timer(1.0, (tmp_path / "may end").touch)
    with ThreadPoolExecutor(CALLS) as pool:
        for number in range(CALLS):
            pool.submit(call, number)
        wait_until(lambda: said.total() >= CALLS - MOST_CALLS)
        with pytest.raises(OutOfReach, match="the server is full"):
            Calls(server.address, Settings()).act(TABLE, REQUEST, 60.0)
        assert Calls(server.address, Settings()).act("healthz", b"", 60.0) == b"ok"
        later.start()
        with loaderd.connect([server.address], "train", batch_size=100, workers=1) as loader:
            assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(1000))
    assert said["16 rows"] and f"OutOfReach: the server at {server.address}: the server is full" in said
    assert all(what == "16 rows" or what.startswith("OutOfReach: ") for what in said), said


def test_calls_that_have_ended_leave_room(start_server: Callable[..., NetworkServer]):
    """Whatever became of them."""
    server = start_server()
    path = flight.FlightDescriptor.for_path("nothing")
    digest = msgpack.unpackb(Calls(server.address, Settings()).act(TABLE, REQUEST, 60.0))["digest"]
    rows = to_json(RowsTicket("train", digest, ((0, 0, 0, 16),)))
    for _ in range(MOST_CALLS):
        with flight.connect(server.address) as client:
            reader = client.do_get(flight.Ticket(rows))
            reader.read_chunk()
            reader.cancel()
            for failing in (
                lambda client=client: client.do_get(flight.Ticket(b'{"dataset": "nothing"}')).read_all(),
                lambda client=client: client.get_schema(path),
                lambda client=client: client.do_exchange(path)[1].read_chunk(),
            ):
                with pytest.raises((pa.ArrowException, OSError)):
                    failing()
    wait_until(lambda: is_answered(server))


def is_answered(server: NetworkServer) -> bool:
    with contextlib.suppress(OutOfReach):
        return bool(Calls(server.address, Settings()).act(TABLE, REQUEST, 60.0))
    return False


# A Flight server that has memory for the stack of one more thread. "wait" takes until a line comes.
WITHOUT_THREADS = """
import os, re, resource, sys, threading
import pyarrow.flight as flight

class Server(flight.FlightServerBase):
    def do_action(self, context, action):
        if action.type == "wait":
            may_end.wait()
        return [b"an answer"]

may_end = threading.Event()
server = Server("grpc://127.0.0.1:0")
threading.stack_size(1 << 20)
used = int(re.search(r"VmData:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10
stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
resource.setrlimit(resource.RLIMIT_DATA, (used + 3 * stack // 2, -1))
print(server.port, flush=True)
sys.stdin.readline()
may_end.set()
sys.stdin.readline()
os._exit(0)
"""


def test_a_server_that_can_start_no_thread_is_asked_again():
    command = ["sh", "-c", 'ulimit -s 1000000; exec "$0" -c "$1"', sys.executable, WITHOUT_THREADS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process, ThreadPoolExecutor(16) as pool:
        assert process.stdout is not None and process.stdin is not None
        address = f"grpc://127.0.0.1:{int(process.stdout.readline())}"
        waiting = [pool.submit(Calls(address, Settings()).act, "wait", b"", 60.0) for _ in range(16)]
        wait_until(lambda: any(each.done() for each in waiting))
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            process.stdin.write("\n")
            process.stdin.flush()

        servers = Servers((address,), Settings(), say)
        assert servers.ask(lambda calls, timeout_s: calls.act("now", b"", timeout_s), 60.0) == b"an answer"
        process.stdin.close()
    assert "has no room now: Server Threadpool Exhausted; it is asked again" in said[0]
    for each in waiting:
        assert isinstance(each.exception(), OutOfReach | None)
