"""``loaderd serve --listen`` as users start it, of numbered records."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import loaderd
from loaderd.client.connect import ask_status
from tests.helpers.serving import Server, wait_until

MODULE = """
import pathlib
import loaderd

schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id"),
        "twice": loaderd.Derived(lambda id: 2 * id, inputs=("id",), dtype="int64", shape=()),
    },
)
shards = str(pathlib.Path(__file__).parent / "shards" / "*.tfrecord")
train = loaderd.Dataset(shards, schema, loaderd.Shuffle(window_records=200, block_records=16))
"""


class NetworkServer:
    """A server of the data set ``train`` of ``module``, in ``folder``, whose shards are in its folder ``shards``."""

    def __init__(self, folder: Path, *arguments: str, module: str = MODULE, **environment: str) -> None:
        self.folder = folder
        self._module = folder / "datasets_of_test.py"
        self._module.write_text(module)
        self._arguments = arguments
        self._environment = environment
        self._listen: list[str] = []
        self.start()

    def start(self, *, is_ready: bool = True) -> None:
        """Start it, or start it again at the same address, and wait until it ``is_ready``."""
        arguments = ("datasets_of_test:train", "--workers", "2", *self._listen, *self._arguments)
        self.server = Server(self.folder, *arguments, network=True, **self._environment)
        self.address = self.server.address
        self.port = int(self.address.rpartition(":")[2])
        self._listen = ["--listen", f"127.0.0.1:{self.port}"]
        if is_ready:
            self.server.wait_ready()
            self.server.wait_line("is ready")  # the second process

    def dataset(self) -> loaderd.Dataset | loaderd.Concat:
        """The data set that is served."""
        dataset = runpy.run_path(str(self._module))["train"]
        assert isinstance(dataset, (loaderd.Dataset, loaderd.Concat))
        return dataset

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of it."""
        return ask_status(self.server.address)

    def records_sent(self) -> int:
        """To all consumers together."""
        return sum(int(each["records"]) for each in self.report()["consumers"])  # as of a second ago

    def reload(self) -> None:
        """SIGHUP, and wait until other processes serve, and no old one answers any more."""
        self.server.process.send_signal(signal.SIGHUP)
        self.server.wait_line("reloaded")
        self.wait_processes()

    def kill_processes(self) -> None:
        """Those that answer; the supervisor starts others."""
        for pid in self.server.processes():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, whole."""
        self.server.close()

    def restart(self) -> None:
        """Kill it, whole, and start it again at the same address."""
        self.close()
        self.start()

    def wait_processes(self) -> list[int]:
        """Its processes, when there are as many as it should have."""
        wait_until(lambda: len(self.server.processes()) == 2)
        return self.server.processes()
