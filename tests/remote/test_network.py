"""Consumers on the network: real servers, and a loader whose workers ask them for rows."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from importlib.util import find_spec
from itertools import chain

import numpy as np
import pytest

import loaderd
from loaderd import testing
from loaderd.errors import OptionError, RecordMismatchError, ServerError, SkippedDataWarning
from loaderd.kernels.crc import framed
from loaderd.serve.app import MAKERS
from tests.helpers.device_program import unpacked
from tests.helpers.own_processes import wait_for_no_daemon
from tests.helpers.serving import wait_until
from tests.remote.network_server import MODULE


def check(batch):
    """The numbers of a batch, whose fields must agree."""
    assert np.array_equal(batch["bits"] @ 2.0 ** np.arange(31, -1, -1), batch["id"])
    assert np.array_equal(batch["twice"], 2 * batch["id"])
    return batch["id"].tolist()


def connect(*servers, **options):
    options = {"batch_size": 64, "workers": 2, **options}
    return loaderd.connect([server.address for server in servers], "train", **options)


@pytest.fixture(scope="module")
def two_epochs(embedded):
    """What an embedded loader makes of the data set: two epochs, batch by batch."""
    return embedded[: len(embedded) // 5]


def test_batches_are_those_of_an_embedded_loader(server, two_epochs, monkeypatch):
    monkeypatch.delenv("LOADERD_KERNELS")
    with connect(server, epochs=2) as loader:
        assert [check(batch) for batch in loader] == two_epochs
        statistics = loader.statistics()
        assert (statistics.num_records, statistics.num_shards) == (1000, 3)
        assert statistics.kernels == ("compiled" if find_spec("llvmlite") else "numpy")
        assert list(loader.schema.fields) == ["bits", "id", "twice"]
    assert sorted(chain(*two_epochs[:16])) == list(range(1000))


@pytest.mark.one_variant
@pytest.mark.parametrize("options", [{}, {"sharing": "split"}])
def test_split(server, options):
    found = []
    for host in range(2):
        with connect(server, shard=(host, 2), **options) as loader:
            assert loader._sharing == "split"
            found.append([check(batch) for batch in loader])
    assert len(found[0]) == len(found[1])
    assert sorted(chain(*found[0], *found[1])) == list(range(1000))


def test_groups_are_for_one_machine(server):
    with pytest.raises(OptionError, match="for consumers of one machine") as caught:
        connect(server, sharing="mirrored", consumers=2)
    assert "split" in caught.value.hint


def test_several_servers_share_the_work(server, start_server, embedded):
    servers = [start_server(), start_server()]
    with connect(*servers, epochs=10, name="of several") as loader:
        assert [check(batch) for batch in loader] == embedded
    wait_until(lambda: min(server.records_sent() for server in servers) > 0)


MIX = """
growing = str(pathlib.Path(__file__).parent / "grows" / "*.tfrecord")
grows = loaderd.Dataset(growing, schema, fixed.shuffle, refresh="epoch")
train = loaderd.Mix({"fixed": 0.5, "grows": 0.5}, {"fixed": fixed, "grows": grows}, epoch_records=200)
"""


@pytest.mark.slow
def test_a_later_epoch_is_not_compared_with_the_position_at_the_start(start_server, tmp_path, write_numbered_to):
    """A set that does not grow has more shards by then, since the server was reloaded."""
    write_numbered_to(tmp_path / "grows", [100])
    server = start_server(module=MODULE.replace("train =", "fixed =") + MIX)
    with connect(server, batch_size=50, epochs=None) as loader:
        next(iter(loader))
        start = loader.position
    with connect(server, batch_size=50, epochs=None, start=start) as loader:
        batches = iter(loader)
        next(batches)
        (added,) = write_numbered_to(tmp_path / "added", [100])
        added.rename(tmp_path / "shards" / "added.tfrecord")
        server.reload()
        for _ in range(12):
            next(batches)
        assert loader.position.epoch == 3


def test_an_unknown_data_set(server):
    with pytest.raises(ServerError, match=r"no data set 'secret'.*: .*train"):
        loaderd.connect([server.address], "secret", batch_size=64)


def test_nobody_answers():
    with pytest.raises(ServerError, match=r"no server has answered for 1 s.*nothing answers at 127\.0\.0\.1:1"):
        loaderd.connect(["http://127.0.0.1:1"], "train", batch_size=64, reconnect_timeout=1.0)


def test_a_server_that_comes_later_is_waited_for(start_server, two_epochs):
    """A trainer may start before its servers."""
    server = start_server()
    server.close()
    later = threading.Timer(0.5, server.start)
    later.start()
    with connect(server, epochs=2) as loader:
        assert [check(batch) for batch in loader] == two_epochs
    later.join()


def fails():
    raise OSError("no such host yet")


@pytest.mark.parametrize(("find", "words"), [(fails, "it failed: OSError: no such host yet"), (list, "no address")])
def test_a_function_that_never_knows_of_a_server(find, words, monkeypatch):
    monkeypatch.setattr("loaderd.client.discovery._FIRST_PAUSE_S", 0.01)
    with pytest.raises(ServerError, match=f"has named no server for 0.1 s; the last time, .*{words}") as caught:
        loaderd.connect(find, "train", batch_size=64, reconnect_timeout=0.1)
    assert isinstance(caught.value.__cause__, OSError) == (find is fails)


def test_who_waits_for_a_function_can_interrupt_it():
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def find():
        if not interrupt.ident:
            interrupt.start()
        raise OSError("no such host yet")

    with pytest.raises(KeyboardInterrupt):
        loaderd.connect(find, "train", batch_size=64)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ([], "at least one address"),
        (["http://a"], "address must be"),
        (["unix:///tmp/x"], "address must be"),
        ("ftp://a:1", "address must be"),
        ("grpc+tls://a:1", "grpc\\+tls:// is no more: servers speak HTTP"),
        (7, "addresses of servers must be a list"),
        (lambda: "http://a:1", "addresses of servers must be a list"),
        (lambda: None, "addresses of servers must be a list"),
        (lambda: ["http://a"], "address must be"),
    ],
)
def test_addresses_that_are_none(address, words):
    with pytest.raises(OptionError, match=words):
        loaderd.connect(address, "train", batch_size=64)


def test_nothing_is_left_of_consumers_that_have_gone(server):
    def left():
        at = [f"/proc/{pid}" for pid in server.wait_processes()]
        return sum(len(os.listdir(f"{each}/fd")) for each in at), sum(len(os.listdir(f"{each}/task")) for each in at)

    def come_and_go():
        with connect(server, epochs=None) as loader:
            next(iter(loader))

    come_and_go()
    before = left()
    for _ in range(3):
        come_and_go()
    most_threads = before[1] + 2 * (MAKERS + 1)  # those that make rows begin when they are first needed
    wait_until(lambda: left()[0] <= before[0] + 3 * len(server.wait_processes()) and left()[1] <= most_threads)
    wait_for_no_daemon()


@pytest.mark.slow
def test_a_slow_line_is_told_from_slow_workers(start_server):
    server = start_server("--max-bandwidth", "5kB")
    with connect(server, epochs=None) as loader:
        for batch in loader:
            check(batch)
            if (found := loader.diagnose()).verdict != "nothing yet":
                break
    assert (found.verdict, found.limiting_stage) == ("storage", "read")
    assert "the network to them" in found.cause


def test_what_servers_leave_out_is_said_here(start_server, tmp_path):
    skipping = MODULE.replace("block_records=16)", 'block_records=16), on_corrupt="skip_record"')
    shards = sorted((tmp_path / "shards").iterdir())
    whole = shards[0].read_bytes()
    shards[0].write_bytes(framed(b"") + whole)
    damaged = testing.damage(shards[1], record=9)
    with warnings.catch_warnings(record=True) as warned, connect(start_server(module=skipping)) as loader:
        assert sorted(chain(*map(check, loader))) == [n for n in range(1000) if n != 309]
    of_index, mismatch = (str(each.message) for each in warned if each.category is SkippedDataWarning)
    assert "1 damaged record in 1 of 3 shards is left out; the first damage: " in of_index
    assert f"{shards[1]}: record 9 at byte {damaged}: expected" in of_index
    assert "1 record is left out of batches so far" in mismatch and f"{shards[0]}: record 0 at byte 0" in mismatch
    shards[0].write_bytes(60 * framed(b"") + whole)
    said = f"60 of 1,059 records .*: 60 in {shards[0]}. The first: .*found no features"
    with connect(start_server(module=skipping)) as loader, pytest.raises(RecordMismatchError, match=said):
        list(loader)


def test_packed_batches(server, two_epochs):
    """What the servers' functions make travels finished; the device makes the rest of what is stored."""
    with connect(server, epochs=2, unpack="device") as loader:
        assert list(loader.schema.fields) == ["bits (stored)", "id", "twice"]
        assert [check(batch) for batch in unpacked(loader, loader)] == two_epochs
