"""How many calls wait for a maker, and when the first one may come."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from network_server import SETTINGS

from loaderd.gateway import makers
from loaderd.gateway.answers import NotReady
from loaderd.gateway.maker import Maker
from loaderd.gateway.makers import calls_per_maker
from loaderd.memory.anonymous import SharedMemory
from loaderd.protocol.messages import Make
from loaderd.remote.tickets import REMOTE_PROTOCOL


@pytest.mark.parametrize(("took_s", "calls"), [(0.0, 32), (0.002, 32), (0.02, 12), (0.06, 4), (30.0, 4)])
def test_as_many_as_have_their_turn_soon(took_s: float, calls: int):
    assert calls_per_maker(took_s) == calls


def test_a_maker_that_dies_before_its_first_message_is_replaced(monkeypatch: pytest.MonkeyPatch):
    dead: list[subprocess.Popen[bytes]] = []

    def start_dead(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.close()
        dead.append(subprocess.Popen(["true"]))
        return dead[-1], ours

    monkeypatch.setattr(makers, "start_process", start_dead)
    some = makers.Makers(1, {}, SharedMemory.create("answers", 1 << 12))
    for number in range(2):  # the first is replaced at the second call
        with pytest.raises(NotReady, match="ask again"):
            some.make(Make(b"%d" % number, 0))
    assert [process.returncode for process in dead] == [0, 0], "nobody has waited for it"
    assert some.restarts == 2


@pytest.mark.parametrize("protocol", [REMOTE_PROTOCOL + 1, "1", None])
def test_consumers_of_another_protocol_are_refused(protocol: object):
    request = json.dumps({"dataset": "train", "protocol": protocol}).encode()
    made = Maker("unix:///nowhere.sock", SharedMemory.create("answers", 1 << 12)).answer(Make(request, -1))
    assert made.error is not None
    assert f"speaks network protocol {REMOTE_PROTOCOL}; the consumer speaks {protocol!r}" in made.error["message"]


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
