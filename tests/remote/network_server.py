"""The processes of a server, without the supervisor: what a test does to one of them, nobody mends."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from harness.process_tree import process_tree

import loaderd
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import AskStatus, Failed, Gateway, Message, Serve, Status, Stop
from loaderd.ipc.spawn import start_process
from tests.helpers.own_processes import children_of

SETTINGS = {
    "host": "127.0.0.1",
    "port": 0,
    "tls_cert": None,
    "tls_key": None,
    "tls_client_ca": None,
    "token": None,
    "max_bandwidth": None,
    "makers": 2,
    "cache": 64 << 20,
    "log_format": "lines",
}
LIMITS = {"max_consumers": 8, "max_held_batches": 16, "max_memory": None, "idle_timeout": None}


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
    """A daemon at a Unix socket in ``folder``, for what there is, and a gateway with ``settings``.

    Raises what they fail with.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], name: str = "server") -> None:
        self._path = folder / f"{name}.sock"
        self.unix_address = f"unix://{self._path}"
        self._module = folder / "datasets_of_test.py"
        self._module.write_text(MODULE)
        self._listener = socket.socket(socket.AF_UNIX)
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._manifests = folder / f"{name}-state"
        self._children: list[tuple[Any, Channel]] = []
        self.start_daemon()
        self.start_gateway(**settings)

    def dataset(self) -> loaderd.Dataset:
        """The data set that is served."""
        dataset = runpy.run_path(str(self._module))["train"]
        assert isinstance(dataset, loaderd.Dataset)
        return dataset

    def start_daemon(self, *, is_reload: bool = False) -> None:
        kept = [] if is_reload else [("train", path.stem) for path in self._manifests.glob("*.json")]
        state = {"manifests": str(self._manifests), "current": dict(kept)}
        serve = Serve({"targets": ["datasets_of_test:train"], "workers": 2, "log_format": "lines", **state, **LIMITS})
        sys.path.insert(0, str(self._module.parent))  # where a process that is started here imports from
        try:
            self.daemon, _ = self._start("loaderd.daemon.server_daemon", serve, (self._listener.fileno(),))
        finally:
            sys.path.pop(0)

    def reload(self) -> None:
        """As on SIGHUP, if all consumers of the daemon have gone: shards that came later are served."""
        for process in (self.daemon, self.gateway):
            process.kill()
            process.wait()
        self.start_daemon(is_reload=True)
        self.start_gateway(port=self.port)

    def start_gateway(self, **settings: Any) -> None:
        message = Gateway({**SETTINGS, "unix": str(self._path), **settings})
        self.gateway, status = self._start("loaderd.gateway.flight", message)
        scheme = "grpc" if message.settings["tls_cert"] is None else "grpc+tls"
        self.port = int(status.report["address"].rpartition(":")[2])
        self.address = f"{scheme}://127.0.0.1:{self.port}"

    def _start(self, module: str, message: Message, fds: tuple[int, ...] = ()) -> tuple[Any, Status]:
        process, sock = start_process(module)
        channel = Channel(sock)
        self._children.append((process, channel))
        channel.send(message, fds)
        while True:
            for answer in channel.receive():
                if isinstance(answer, Failed):
                    raise answer.error
                assert isinstance(answer, Status)
                return process, answer

    def gateway_report(self) -> dict[str, Any]:
        """What the gateway counts."""
        (channel,) = (channel for process, channel in self._children if process is self.gateway)
        channel.send(AskStatus())
        while True:
            for answer in channel.receive():
                assert isinstance(answer, Status)
                return answer.report

    def is_whole(self) -> bool:
        """Whether all of its processes live. What stands still must be closed by who has stopped it."""
        live = self.daemon.poll() is None and self.gateway.poll() is None
        return live and len(self.makers()) == SETTINGS["makers"]

    def makers(self) -> list[int]:
        """The processes that make rows."""
        return children_of(self.gateway.pid, "loaderd-maker")

    def stop(self, text: str) -> None:
        """As the supervisor does on SIGTERM."""
        for _, channel in self._children:
            with contextlib.suppress(ChannelClosed):
                channel.send(Stop(text))

    def close(self) -> None:
        for process, channel in self._children:
            # Those of one that has ended, end too; and its number may be another's by now.
            family = [*descendants(process.pid), process.pid] if process.poll() is None else []
            for pid in family:  # a test may have stopped them: they notice nothing
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            channel.close()
        self._listener.close()


def descendants(pid: int) -> list[int]:
    """All processes that it has started, and those that these have."""
    return process_tree(pid)[1:]
