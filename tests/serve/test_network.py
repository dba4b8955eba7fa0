"""A consumer on another host, on lines as they are: slow, lossy, unplugged for a while, cut in an answer.

Whatever happens, it gets the batches of an undisturbed loader, each once and in order, and its own daemon goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import loaderd
from tests.helpers.serving import MODULE, Server
from tests.serve.network import SERVER, Lines, Network

PORT, LINE_PORT = 8471, 8472
LINE = f"http://127.0.0.1:{LINE_PORT}"
OTHER_LINE = f"http://127.0.0.2:{LINE_PORT}"  # the same, by another name
OPTIONS: dict[str, Any] = {"dataset": "train", "batch_size": 500, "epochs": 8, "held_batches": 2, "workers": 2}
RECORDS = 20_000
ROW_BYTES = 4 + 8
NUM_BATCHES = OPTIONS["epochs"] * RECORDS // OPTIONS["batch_size"]


class Site:
    """A network with a server on it; ``expected``: the ids of each batch."""

    def __init__(self, network: Network, server: Server, expected: list[list[int]]) -> None:
        self.network = network
        self.server = server
        self.expected = expected
        self._started: list[Lines] = []

    def start(self, *command: str) -> Lines:
        """Run a script of this folder on the consumer's host."""
        path = Path(__file__).with_name(command[0])
        self._started.append(Lines(self.network.on("consumer", sys.executable, str(path), *command[1:])))
        return self._started[-1]

    def read(self, address: str | list[str] = f"http://{SERVER}:{PORT}", **options: Any) -> Lines:
        return self.start("reader.py", json.dumps(address), json.dumps({**OPTIONS, **options}))

    def check(self, reader: Lines, first: int = 0) -> None:
        """All batches from number ``first`` on are right, and the consumer's daemon has lived through it all."""
        for number in range(first, NUM_BATCHES):
            assert json.loads(reader.next()) == self.expected[number], f"batch {number}"
        assert json.loads(reader.next()) == {"daemons replaced": 0}
        assert reader.process.wait(60) == 0

    def slow_line(self, **settings: Any) -> Lines:
        """A proxy at ``LINE``."""
        line = self.start("slow_line.py", str(LINE_PORT), SERVER, str(PORT))
        assert line.next() == "ready"
        line.say(settings)
        return line

    def close(self) -> None:
        """End what was started."""
        while self._started:
            self._started.pop().close()


@pytest.fixture(scope="module")
def everything(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[..., list[Path]]
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("network")
    network = Network()
    try:
        write_numbered_to(folder / "shards", [RECORDS // 2, RECORDS // 2])
        (folder / "numbered.py").write_text(MODULE)
        listen = ["--workers", "2", "--listen", f"{SERVER}:{PORT}", "--insecure"]
        server = Server(
            folder, "numbered:train", "--workers", "2", *listen, network=True, through=network.on("server")
        )
        try:
            server.wait_ready()
            schema = loaderd.Schema(
                {"id": loaderd.Int64(), "bits": loaderd.PackedBits(32)}, {"id": loaderd.Array("id")}
            )
            with loaderd.Loader(
                str(folder / "shards" / "*"), schema, batch_size=OPTIONS["batch_size"], epochs=OPTIONS["epochs"]
            ) as loader:
                expected = [batch["id"].tolist() for batch in loader]
            assert len(expected) == NUM_BATCHES
            yield Site(network, server, expected)
        finally:
            server.close()
    finally:
        network.close()


@pytest.fixture
def site(everything: Site) -> Iterator[Site]:
    yield everything
    everything.network.calm()
    everything.close()


@pytest.mark.slow
def test_delay_and_loss(site: Site):
    """Read again and again until something was lost: it is chance what is."""
    site.network.disturb("delay", "20ms", "5ms", "loss", "2%")
    lost_before, until_s = site.network.num_lost(), time.monotonic() + 120
    while site.network.num_lost() == lost_before:
        assert time.monotonic() < until_s
        site.check(site.read())


@pytest.mark.slow
def test_a_slow_line(site: Site):
    site.slow_line(delay_s=0.05, bytes_per_s=500e3)
    began_s = time.monotonic()
    site.check(site.read(LINE, workers=1))
    assert time.monotonic() - began_s > OPTIONS["epochs"] * RECORDS * ROW_BYTES / 500e3


@pytest.mark.slow
def test_bursts_of_loss(site: Site):
    """Read again and again until there was one: a quick machine is done while the line is plugged in."""
    lost_before, until_s = site.network.num_lost(), time.monotonic() + 60
    with ThreadPoolExecutor() as pool:
        while site.network.num_lost() == lost_before:
            assert time.monotonic() < until_s
            reader = site.read()
            assert json.loads(reader.next()) == site.expected[0]
            checked = pool.submit(site.check, reader, 1)
            while not checked.done():
                for plugged in (False, True):
                    site.network.plug(plugged)
                    time.sleep(0.1)
            checked.result()


def test_unplugged_and_plugged_in_again(site: Site):
    reader = site.read()
    assert json.loads(reader.next()) == site.expected[0]
    site.network.plug(False)
    with ThreadPoolExecutor() as pool:
        checked = pool.submit(site.check, reader, 1)
        time.sleep(4.0)
        assert not checked.done(), "all had come before the line was unplugged"
        site.network.plug(True)
        checked.result()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "end", "stall"])
def test_a_connection_that_is_cut_in_the_middle_of_an_answer(site: Site, how: str):
    cuts = [30_000, 100_000, 170_007]
    line = site.slow_line(cuts=[(how, after) for after in cuts])
    # Of one server alone, 5 s are waited for an answer that stalls; where there is another, 1 s.
    site.check(site.read([LINE, OTHER_LINE] if how == "stall" else LINE))
    assert [line.next() for _ in cuts] == [f"{how} after {after} bytes" for after in cuts]


@pytest.mark.slow
def test_a_connection_to_the_only_server_stalls(site: Site):
    line = site.slow_line(cuts=[("stall", 100_000)])
    site.check(site.read(LINE))
    assert line.next() == "stall after 100000 bytes"
