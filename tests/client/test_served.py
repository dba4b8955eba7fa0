"""Loaders of a server's data sets: real servers, that are killed and started again; real signals and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from restarted import MODULE, Restarted
from serving import wait_until

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import BusyError, ClosedError, OptionError, ServerError
from loaderd.protocol.messages import PROTOCOL

Check = Callable[[loaderd.Batch], list[int]]
Write = Callable[[Sequence[int]], list[Path]]

ORDER = {"shuffle": loaderd.Shuffle(window_records=60, block_records=10), "seed": 3}
NUM_RECORDS = 150


@pytest.fixture
def server(tmp_path: Path, write_numbered: Write) -> Iterator[Restarted]:
    write_numbered([100, 50])
    started = Restarted(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def embedded(server: Restarted, numbered_schema: loaderd.Schema) -> Callable[..., list[list[int]]]:
    """The numbers of the same data set's batches, of a loader with a daemon of its own."""

    def read(passes: int = 1, **options: Any) -> list[list[int]]:
        shards = str(server.folder / "shards" / "*.tfrecord")
        with loaderd.Loader(shards, numbered_schema, workers=1, **{"batch_size": 20, **ORDER, **options}) as loader:
            return [batch["id"].tolist() for _ in range(passes) for batch in loader]

    return read


def test_it_is_as_an_embedded_loader(server: Restarted, embedded: Any, check_batch: Check):
    with server.connect(epochs=2, name="me") as loader:
        assert len(loader) == 16 and loader.batches_per_epoch == 8 and loader.batch_size == 20
        assert loader.sharing == "independent" and loader.static_batch_size is None
        assert list(loader.schema.fields) == ["bits", "id"]
        found = [check_batch(batch) for _ in range(2) for batch in loader]
        assert found == embedded(epochs=2, passes=2)
        batch = next(iter(loader))
        with pytest.raises(ValueError, match="read-only"):
            batch["id"][0] = 0
        loader.seek(loaderd.Position(1, 3))
        assert [check_batch(batch) for batch in loader] == found[11:16]
        facts = loader.statistics()
        assert (facts.num_records, facts.num_shards, facts.batches_delivered) == (NUM_RECORDS, 2, 38)
        assert facts.daemon_restarts == facts.batches_copied == 0 and facts.slots_lent == 1
        (consumer,) = ask_status(server.address)["consumers"]
        assert consumer["name"] == "me" and consumer["pid"] == os.getpid()


def test_positions_are_those_of_an_embedded_loader(server: Restarted, embedded: Any, check_batch: Check):
    with server.connect(epochs=None) as loader:
        batches = iter(loader)
        for _ in range(11):
            next(batches)
        position = loader.position
    assert (position.epoch, position.batch) == (1, 3)
    assert embedded(start=position, epochs=2) == embedded(epochs=2)[11:]
    with server.connect(start=loaderd.Position.from_json(position.to_json()), epochs=2) as loader:
        assert [check_batch(batch) for batch in loader] == embedded(epochs=2)[11:]
    other = loaderd.Position(of={**position.of, "seed": 4})
    with pytest.raises(OptionError, match="seed: 4 when the position was taken, 3 now"):
        server.connect(start=other)


@pytest.mark.parametrize("sharing", ["independent", pytest.param("split", marks=pytest.mark.slow)])
def test_a_server_that_is_killed_at_every_batch(
    server: Restarted, embedded: Any, check_batch: Check, sharing: Any, caplog: pytest.LogCaptureFixture
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
                rank.seek(loaderd.Position(0, step))
            iterators = [iter(rank) for rank in ranks]
            if step % 2:
                server.kill_daemon()
            else:
                server.restart()
            for batches, whole in zip(iterators, expected, strict=True):
                got = [(batch, check_batch(batch)) for batch in batches]
                assert [numbers for _, numbers in got] == whole[step:]
                held.append(got[0])
            for batch, then in held:
                assert check_batch(batch) == then
        assert all(rank.statistics().daemon_restarts == len(expected[0]) for rank in ranks)
    gone = (
        f"the server at {server.address} closed the connection; calling it for up to 300 s, to go on at batch 1 of "
    )
    assert gone + "epoch 0" in [record.message for record in caplog.records]
    calls = [record.message for record in caplog.records if "the server at" in record.message]
    assert len(calls) % 2 == 0
    for gone, back in zip(calls[::2], calls[1::2], strict=True):
        assert back == f"the server at {server.address} is back; going on at {gone.partition('to go on at ')[2]}"


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
        assert "ends: " in warning and f"to go on at batch {len(found)} of epoch 0" in warning
        assert loader.position.batch == len(found)
        server.start()
        found.extend(batch["id"].tolist() for batch in batches)
        assert found == embedded(batch_size=5)


@pytest.mark.slow
@pytest.mark.parametrize("way", [r"the same iterator again \(next\)", r"call loader\.seek\(loader\.position\)"])
def test_what_the_hint_says_goes_on_with_the_same_batch(server: Restarted, embedded: Any, way: str):
    """A new loop begins the next pass otherwise, and the rest of this one is left out."""
    with server.connect(5, reconnect_timeout=0.2) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        server.kill()
        with pytest.raises(ServerError, match=way):
            found.extend(batch["id"].tolist() for batch in batches)
        server.start()
        if "seek" in way:
            loader.seek(loader.position)
            batches = iter(loader)
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
    monkeypatch.setattr("loaderd.client.served_sources.PROTOCOL", 99)
    with pytest.raises(ServerError, match=rf"speaks protocol {PROTOCOL}; the consumer is loaderd \S+ and speaks 99"):
        server.connect()


@pytest.mark.slow
def test_another_data_set_of_the_same_name(server: Restarted):
    """The server was started again with other code: nothing of it is taken for what it was."""
    with server.connect(5) as loader:
        batches = iter(loader)
        next(batches)
        server.kill()
        # Of another size, too: Python takes code of the same second and size for what it has compiled.
        (server.folder / "sets.py").write_text(MODULE.replace("seed=3", "seed=44"))
        server.start()
        with pytest.raises(ServerError, match="another data set 'train' now: another seed"):
            list(batches)
        with pytest.raises(ClosedError):
            next(batches)


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


# ----------------------------------------------------------------------------------------- groups


def in_turns(
    quick: loaderd.ServedLoader, slow: loaderd.ServedLoader, check: Check, num_batches: int
) -> tuple[list[list[int]], list[list[int]]]:
    """What each of two loaders gets of a pass that they share, of which the slow one asks half as often."""
    of_quick: list[list[int]] = []
    of_slow: list[list[int]] = []

    def all_are_taken() -> bool:
        return len(of_quick) + len(of_slow) == num_batches

    def consume_slowly() -> None:
        for batch in slow:
            of_slow.append(check(batch))
            wait_until(lambda: 2 * len(of_slow) <= len(of_quick) or all_are_taken())

    thread = threading.Thread(target=consume_slowly)
    thread.start()
    for batch in quick:
        of_quick.append(check(batch))
        wait_until(lambda: bool(of_slow))
    thread.join()
    return of_quick, of_slow


def test_consumers_that_take_turns(server: Restarted, check_batch: Check):
    """Whoever asks gets the next batch: who asks more often gets more, and together they get each batch once."""
    with contextlib.ExitStack() as opened:
        quick, slow = (opened.enter_context(server.connect(10, sharing="shared", consumers=2)) for _ in range(2))
        assert quick.sharing == "shared" and (quick.position.epoch, quick.position.batch) == (0, 0)
        for epoch in range(2):
            of_quick, of_slow = in_turns(quick, slow, check_batch, 15)
            assert sorted(number for numbers in of_quick + of_slow for number in numbers) == list(range(NUM_RECORDS))
            assert 0 < len(of_slow) < len(of_quick)
            assert quick.position == slow.position and quick.position.epoch == epoch + 1
        for refused in (quick.new_pass, lambda: quick.seek(loaderd.Position()), lambda: quick.fetch(None, 0)):
            with pytest.raises(OptionError, match="none can be asked for by its number"):
                refused()
        with pytest.raises(TypeError, match="nobody knows how many"):
            len(quick)


@pytest.mark.slow
def test_what_takes_turns_survives_the_server(server: Restarted, check_batch: Check):
    """It is killed again and again: what was used up does not come again, and nothing is left out."""
    with contextlib.ExitStack() as opened:
        loaders = [opened.enter_context(server.connect(20, sharing="shared", consumers=2)) for _ in range(2)]
        iterators = [iter(loader) for loader in loaders]
        found: list[int] = []

        def consume(batches: Iterator[loaderd.Batch], kills: Callable[[], None] | None) -> None:
            for batch in batches:
                found.extend(check_batch(batch))
                if kills is not None:
                    kills()

        thread = threading.Thread(target=consume, args=(iterators[0], None))
        thread.start()
        consume(iterators[1], server.kill_daemon)
        thread.join()
        assert sorted(found) == list(range(NUM_RECORDS))


@pytest.mark.slow
def test_its_place_is_taken_when_it_comes_back(server: Restarted, caplog: pytest.LogCaptureFixture):
    """As when a server notices late that a connection is lost: it waits until there is one."""
    options = {"batch_size": 10, "sharing": "shared", "consumers": 1}
    with server.connect(**options) as loader:
        batches = iter(loader)
        next(batches)
        server.restart()
        other = server.connect(**options)
        with pytest.raises(BusyError, match="the group '' has its 1 consumers"):
            server.connect(**options)
        threading.Timer(0.5, other.close).start()
        assert len(list(batches)) == 14
    gone, refused, _ = [record.message for record in caplog.records]
    assert "calling it for up to" in gone and "the group '' has its 1 consumers; calling it" in refused


@pytest.mark.slow
def test_consumers_that_all_get_the_same(server: Restarted, embedded: Any, check_batch: Check):
    with contextlib.ExitStack() as opened:
        loaders = [opened.enter_context(server.connect(sharing="mirrored", consumers=2)) for _ in range(2)]
        found: list[list[list[int]]] = [[], []]

        def consume(number: int) -> None:
            for batch in loaders[number]:
                found[number].append(check_batch(batch))
                if len(found[number]) == 4 and number == 0:
                    server.restart()

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [embedded()] * 2


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["close", "garbage", "interrupt"])
@pytest.mark.parametrize("sharing", ["mirrored", "shared"])
def test_what_a_member_holds_stays_as_it_is_when_its_connection_goes(
    server: Restarted, embedded: Any, check_batch: Check, sharing: Any, how: str
):
    """Its slots are filled again for the others."""
    options: dict[str, Any] = {"batch_size": 5, "sharing": sharing, "consumers": 2}
    with server.connect(**options) as other:
        loader = server.connect(**options)
        read: list[list[int]] = []
        thread = threading.Thread(target=lambda: read.extend(check_batch(batch) for batch in other))
        batches = iter(loader)
        if sharing == "mirrored":  # it begins when both have asked
            thread.start()
        batch = next(batches)
        ids = check_batch(batch)
        if sharing == "shared":
            thread.start()
        if how == "close":
            loader.close()
        elif how == "interrupt":
            loader._stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            next(batches, None)  # of a "shared" group, the other one may have had all
        del loader, batches
        thread.join()
        assert check_batch(batch) == ids
        assert len(read) >= 29 and (sharing == "shared" or read == embedded(batch_size=5))


def test_what_was_held_is_gone_when_nobody_holds_it(server: Restarted):
    with server.connect(5, sharing="shared") as loader:
        batches, held, found = iter(loader), [], []
        for _ in range(20):
            held = [*held[-1:], next(batches)]
            loader._stream._now.torn = True  # type: ignore[attr-defined] # as Ctrl-C leaves it
            found.append(len(Path("/proc/self/maps").read_text().splitlines()))
        assert max(found) <= found[4] + 4


def test_a_batch_that_is_taken_while_the_loader_is_closed_is_not_given(server: Restarted):
    """By another thread: the server may fill its slot again before anybody sees it."""
    loader = server.connect(5, sharing="mirrored")
    reader = loader._stream._now.reader  # type: ignore[attr-defined]
    lend = reader.lend
    reader.lend = lambda *slot: (loader.close(), lend(*slot))[1]
    with pytest.raises(ClosedError):
        next(iter(loader))
