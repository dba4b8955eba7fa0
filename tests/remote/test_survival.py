"""Each process on the way to a consumer is killed, and started again; the consumer goes on with the next batch."""

from __future__ import annotations

import os
import signal

import pytest
from network_server import relays

import loaderd
from loaderd.errors import ServerError


def connect(server, **options):
    return loaderd.connect(server.address, **{"dataset": "train", "batch_size": 64, "epochs": 3, **options})


@pytest.mark.parametrize("victim", ["relay", "gateway", "daemon", "all of the server"])
def test_a_process_is_killed_and_comes_back(start_server, victim):
    server = start_server()
    epochs = 100  # so many that they are not all on their way when it happens
    with loaderd.Loader(server.dataset(), batch_size=64, epochs=epochs, workers=1) as loader:
        expected = [batch["id"].tolist() for batch in loader]
    with connect(server, epochs=epochs) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch["id"].tolist())
            if number != 20:
                continue
            if victim == "relay":
                os.kill(*relays(), signal.SIGKILL)
            if victim in ("gateway", "all of the server"):
                server.gateway.kill()
                server.gateway.wait()
            if victim in ("daemon", "all of the server"):
                server.daemon.kill()
                server.daemon.wait()
                server.start_daemon()
            if victim in ("gateway", "all of the server"):
                server.start_gateway(port=server.port)
        assert found == expected
        assert loader.statistics().daemon_restarts == 1


def test_the_server_says_goodbye_and_does_not_come_back(start_server):
    server = start_server()
    with connect(server, reconnect_timeout=1.0) as loader:
        batches = iter(loader)
        next(batches)
        server.stop("maintenance")
        assert server.daemon.wait(20) == 0 and server.gateway.wait(20) == 0
        with pytest.raises(ServerError, match="it was called for 1 s"):
            for _ in batches:
                pass


def test_a_consumer_that_stands_still_stops_nobody(start_server):
    server = start_server()
    with connect(server) as stopped:
        batches = iter(stopped)
        taken = next(batches).num_records
        (relay,) = relays()
        os.kill(relay, signal.SIGSTOP)
        with connect(server) as other:
            assert sum(batch.num_records for batch in other) == 3000
        os.kill(relay, signal.SIGCONT)
        assert taken + sum(batch.num_records for batch in batches) == 3000


def test_the_processes_end_with_who_started_them(start_server):
    server = start_server()
    with connect(server) as loader:
        next(iter(loader))
        assert len(relays()) == 1
    assert not relays()
    for _, channel in server._children:
        channel.close()
    assert server.gateway.wait(20) == 0 and server.daemon.wait(20) == 0
