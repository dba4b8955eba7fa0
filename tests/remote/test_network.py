"""Consumers on the network: a real daemon, a real gateway, the relay that connect() starts."""

from __future__ import annotations

import os
import signal
import threading
from importlib.util import find_spec
from itertools import chain

import numpy as np
import pytest
from network_server import relays, wait_until

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import ServerError
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import Dial, Failed, Hello
from loaderd.protocol.process import start_process


def check(batch):
    """The numbers of a batch, whose fields must agree."""
    assert np.array_equal(batch["bits"] @ 2.0 ** np.arange(31, -1, -1), batch["id"])
    assert np.array_equal(batch["twice"], 2 * batch["id"])
    return batch["id"].tolist()


def connect(server, **options):
    return loaderd.connect(server.address, **{"dataset": "train", "batch_size": 64, **options})


@pytest.fixture(scope="module")
def server(start_shared_server):
    return start_shared_server()


@pytest.fixture(scope="module")
def embedded(server):
    """What an embedded loader makes of the data set: two epochs, batch by batch."""
    with loaderd.Loader(server.dataset(), batch_size=64, epochs=2, workers=1) as loader:
        return [check(batch) for batch in loader]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_batches_are_those_of_an_embedded_loader(server, embedded, packed, compression):
    with connect(server, epochs=2, packed=packed, compression=compression) as loader:
        assert [check(batch) for batch in loader] == embedded
        assert loader.statistics().num_records == 1000
        # Of a packed stream, what the consumer unpacks with.
        assert loader.statistics().kernels == ("compiled" if find_spec("llvmlite") else "numpy")
    assert sorted(chain(*embedded[:16])) == list(range(1000))


def test_it_goes_on_at_a_position(server, embedded):
    with connect(server, epochs=2) as loader:
        for _, batch in zip(range(5), loader, strict=False):
            check(batch)
        position = loader.position
    with connect(server, epochs=2, start=position) as loader:
        assert [check(batch) for batch in loader] == embedded[5:]


def test_who_holds_all_batches_gets_copies(server, embedded):
    with connect(server, epochs=2, held_batches=2) as loader:
        held = list(loader)
        assert [check(batch) for batch in held] == embedded
        assert loader.statistics().batches_copied >= len(embedded) - 2


def test_split(server):
    found = []
    for host in range(2):
        with connect(server, sharing="split", shard=(host, 2)) as loader:
            found.append([check(batch) for batch in loader])
    assert len(found[0]) == len(found[1])
    assert sorted(chain(*found[0], *found[1])) == list(range(1000))


@pytest.mark.parametrize("sharing", ["mirrored", "shared"])
def test_groups(server, embedded, sharing):
    found = [[], []]
    both_are_there = threading.Barrier(2)  # a group ends with its last consumer: who comes then begins anew

    def consume(number):
        with connect(server, sharing=sharing, consumers=2, group=sharing, epochs=2) as loader:
            both_are_there.wait()
            for batch in loader:
                found[number].append(check(batch))

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sharing == "mirrored":
        assert found[0] == found[1] == embedded
    else:
        assert sorted(found[0] + found[1]) == sorted(embedded)


def test_an_unknown_data_set(server):
    with pytest.raises(ServerError, match=r"no data set 'secret'.*'train'"):
        connect(server, dataset="secret")


def test_options_that_the_server_refuses(server):
    with pytest.raises(loaderd.errors.LoaderdError, match="held_batches"):
        connect(server, held_batches=1000)


def test_status(server):
    with connect(server, name="the trainer") as loader:
        next(iter(loader))
        report = ask_status(server.address)
        assert [each["name"] for each in report["datasets"]] == ["train"]
        assert "the trainer" in [each["name"] for each in report["consumers"]]


def test_a_consumer_of_another_version(server):
    process, sock = start_process("loaderd.remote.relay")
    channel = Channel(sock)
    channel.send(Dial(server.address, {"token": None, "tls": None, "compression": None}))
    channel.send(Hello(999, "99.0", "train"))
    heard = []
    with pytest.raises(ChannelClosed):
        while True:
            heard += channel.receive()
    assert len(heard) == 1 and isinstance(heard[0], Failed)
    assert "speaks 999" in heard[0].error["message"] and "same version" in heard[0].error["hint"]
    assert process.wait() == 0


def test_nobody_answers(server):
    with pytest.raises(ServerError, match=r"nothing answers at 127\.0\.0\.1:1: Connection refused"):
        loaderd.connect("grpc://127.0.0.1:1", dataset="train", batch_size=64)


def test_nothing_is_left_of_consumers_that_have_gone(server):
    def left():
        at = f"/proc/{server.gateway.pid}"
        return len(os.listdir(f"{at}/fd")), sum("loaderd-" in line for line in open(f"{at}/maps"))

    with connect(server):  # what gRPC keeps from the first connection on
        pass
    wait_until(lambda: left()[1] == 0)
    before = left()
    for end in ("close", "kill"):
        for _ in range(3):
            with connect(server, epochs=None) as loader:
                next(iter(loader))
                assert left()[1] == 1
                if end == "kill":
                    os.kill(*relays(), signal.SIGKILL)
        wait_until(lambda: left() <= before)
    assert ask_status(server.address)["consumers"] in ([], ask_status(server.address)["consumers"][:1])
