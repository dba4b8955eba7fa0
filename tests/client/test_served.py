"""Loaders of a server's data sets: real servers, that are killed and started again; real signals and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import ClosedError, OptionError, ServerError
from loaderd.ipc.messages import PROTOCOL
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted
from tests.helpers.serving import wait_until

NUM_RECORDS = 150


def test_it_is_as_an_embedded_loader(server: Restarted, embedded: Any, numbered: Numbered):
    with server.connect(epochs=2, name="me") as loader:
        assert len(loader) == 16 and loader.batches_per_epoch == 8 and loader.batch_size == 20
        assert loader._sharing == "independent" and loader._static_batch_size is None
        assert list(loader.schema.fields) == ["bits", "id"]
        found = [numbered.check(batch) for _ in range(2) for batch in loader]
        assert found == embedded(epochs=2, passes=2)
        batch = next(iter(loader))
        with pytest.raises(ValueError, match="read-only"):
            batch["id"][0] = 0
        loader.load_state_dict(loaderd.Position(1, 3))
        assert numbered.batches(loader) == found[11:16]
        facts = loader.statistics()
        assert (facts.num_records, facts.num_shards, facts.batches_delivered) == (NUM_RECORDS, 2, 38)
        assert facts.daemon_restarts == facts.batches_copied == 0 and facts.slots_lent == 1
        (consumer,) = ask_status(server.address)["consumers"]
        assert consumer["name"] == "me" and consumer["pid"] == os.getpid()


def test_positions_are_those_of_an_embedded_loader(server: Restarted, embedded: Any, numbered: Numbered):
    with server.connect(epochs=None) as loader:
        batches = iter(loader)
        for _ in range(11):
            next(batches)
        position, state = loader.position, loader.state_dict()
    assert (position.epoch, position.batch) == (1, 3)
    assert embedded(start=position, epochs=2) == embedded(epochs=2)[11:]
    with server.connect(epochs=2) as loader:
        loader.load_state_dict(state)
        assert numbered.batches(loader) == embedded(epochs=2)[11:]
    other = loaderd.Position(of={**position.of, "seed": 4})
    with pytest.raises(OptionError, match="seed: 4 when the position was taken, 3 now"):
        server.connect(start=other)


@pytest.mark.parametrize("sharing", ["independent", pytest.param("split", marks=pytest.mark.slow)])
def test_a_server_that_is_killed_at_every_batch(
    server: Restarted, embedded: Any, numbered: Numbered, sharing: Any, caplog: pytest.LogCaptureFixture
):
    """The daemon alone, and all of it: the next batch is the next batch, and what is held stays right."""
    number = 2 if sharing == "split" else 1
    expected = [embedded(shard=(i, number), batch_size=40) for i in range(number)]
    held: list[tuple[loaderd.Batch, list[int]]] = []
    with contextlib.ExitStack() as opened:
        options = {"sharing": sharing, "batch_size": 40}
        ranks = [opened.enter_context(server.connect(shard=(i, number), **options)) for i in range(number)]
        for step in range(len(ranks[0])):
            for rank in ranks:
                rank.load_state_dict(loaderd.Position(0, step))
            iterators = [iter(rank) for rank in ranks]
            if step % 2:
                server.kill_daemon()
            else:
                server.restart()
            for batches, whole in zip(iterators, expected, strict=True):
                got = [(batch, numbered.check(batch)) for batch in batches]
                assert [numbers for _, numbers in got] == whole[step:]
                held.append(got[0])
            for batch, then in held:
                assert numbered.check(batch) == then
        assert all(rank.statistics().daemon_restarts == len(expected[0]) for rank in ranks)
    gone = f"the server at {server.address} closed the connection; calling it for up to 300 s"
    calls = [record.message for record in caplog.records if "the server at" in record.message]
    assert gone in calls[::2] and set(calls[1::2]) == {f"the server at {server.address} is back"}
    assert len(calls) % 2 == 0


@pytest.mark.slow
def test_a_server_that_ends_in_good_order(server: Restarted, embedded: Any, caplog: pytest.LogCaptureFixture):
    """What it delivered is used up, then it is called; and when that is in vain, the loader can go on later."""
    with server.connect(5, reconnect_timeout=1.0) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        while ask_status(server.address)["consumers"][0]["slots_lent"] < 5:
            time.sleep(0.01)
        server.now.process.send_signal(signal.SIGTERM)
        assert server.now.wait_end() == 0
        with pytest.raises(ServerError, match=r"cannot be reached: .*; it was called for 1 s, and no batch came"):
            found.extend(batch["id"].tolist() for batch in batches)
        assert 5 <= len(found) < 30
        (warning,) = [record.message for record in caplog.records]
        assert "ends: " in warning
        assert loader.position.batch == len(found)
        server.start()
        found.extend(batch["id"].tolist() for batch in batches)
        assert found == embedded(batch_size=5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_a_call_in_vain_can_be_ended(server: Restarted, embedded: Any, how: str):
    """By close() in another thread, and by Ctrl-C; after that, the loader goes on."""
    loader = server.connect(5)  # more batches than there are slots: they are not all here yet
    batches = iter(loader)
    found = [next(batches)["id"].tolist()]
    server.kill()
    ends = {"close": loader.close, "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT)}
    ended: dict[str, type[BaseException]] = {"close": ClosedError, "interrupt": KeyboardInterrupt}
    timer = threading.Timer(1.5, ends[how])
    timer.start()
    began_s, used_s = time.monotonic(), time.process_time()
    with pytest.raises(ended[how]):
        found.extend(batch["id"].tolist() for batch in batches)
    assert time.monotonic() - began_s < 60 and time.process_time() - used_s < 1, "it waits in the kernel, and not on"
    timer.join()
    if how == "interrupt":
        server.start()
        found.extend(batch["id"].tolist() for batch in batches)
        assert found == embedded(batch_size=5)
        loader.close()
    with pytest.raises(ClosedError):
        next(iter(loader))


def test_a_data_set_in_the_place_of_its_name():
    dataset = loaderd.Dataset("*.tfrecord", loaderd.schemas.chess_eval())
    with pytest.raises(OptionError, match=r"^dataset must be the name of .*, got a Dataset\nServe it, .*\.$"):
        loaderd.connect("unix:", dataset=dataset, batch_size=10)  # type: ignore[arg-type]


def test_what_a_server_refuses(server: Restarted, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ServerError, match="there is no data set 'test'; this server has: train"):
        loaderd.connect(server.address, dataset="test", batch_size=20)
    with pytest.raises(OptionError, match="batch_size must be at most 150"):
        server.connect(151, remainder="drop")
    with pytest.raises(ServerError, match="held_batches"):
        server.connect(held_batches=1000)
    monkeypatch.setattr("loaderd.client.served_source.PROTOCOL", 99)
    with pytest.raises(ServerError, match=rf"speaks protocol {PROTOCOL}; the consumer is loaderd \S+ and speaks 99"):
        server.connect()


_NOTEBOOK = """
import sys, loaderd
address, path = sys.argv[1:]
try:
    start = loaderd.Position.from_json(open(path).read())
except FileNotFoundError:
    start = None
with loaderd.connect(address, dataset="train", batch_size=20, start=start) as loader:
    for batch in loader:
        with open(path, "w") as file:
            file.write(loader.position.to_json())
        print(*batch["id"], flush=True)
        sys.stdin.readline()
"""


def test_a_consumer_that_is_killed_and_started_again(server: Restarted, embedded: Any, tmp_path: Path):
    """As a notebook is: with the position that it kept, it gets the next batch; the server has forgotten it."""
    found = []
    with server.connect() as other:
        others = iter(other)
        seen = [next(others)["id"].tolist()]
        for _ in range(4):
            arguments = [sys.executable, "-c", _NOTEBOOK, server.address, str(tmp_path / "position")]
            with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as notebook:
                assert notebook.stdin is not None and notebook.stdout is not None
                for _ in range(2):
                    found.append([int(number) for number in notebook.stdout.readline().split()])
                    if len(found) % 2:
                        notebook.stdin.write("\n")
                        notebook.stdin.flush()
                notebook.kill()
        assert found == embedded()
        wait_until(lambda: [one["pid"] for one in ask_status(server.address)["consumers"]] == [os.getpid()])
        seen += [batch["id"].tolist() for batch in others]
        assert seen == found, "to nobody else it makes a difference"
