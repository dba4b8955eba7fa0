"""The processes of a server, without the supervisor: what a test does to one of them, nobody mends."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaderd.errors import from_wire
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import Failed, Gateway, Message, Serve, Status, Stop
from loaderd.protocol.process import start_process

SETTINGS = {
    "host": "127.0.0.1",
    "port": 0,
    "tls_cert": None,
    "tls_key": None,
    "tls_client_ca": None,
    "token": None,
    "max_consumers": 8,
    "log_format": "lines",
}
LIMITS = {"max_consumers": 8, "max_held_batches": 16, "max_bandwidth": None, "idle_timeout": None}


class NetworkServer:
    """A daemon at the Unix socket ``path``, and a gateway with ``settings``. Raises what they fail with."""

    def __init__(self, path: Path, target: str, settings: dict[str, Any]) -> None:
        self._path = path
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._children: list[tuple[Any, Channel]] = []
        self.start_daemon()
        self.start_gateway(**settings)

    def start_daemon(self) -> None:
        serve = Serve({"targets": [self._target], "workers": 2, "log_format": "lines", **LIMITS})
        self.daemon, _ = self._start("loaderd.daemon.server", serve, (self._listener.fileno(),))

    def start_gateway(self, **settings: Any) -> None:
        message = Gateway({**SETTINGS, "unix": str(self._path), **settings})
        self.gateway, status = self._start("loaderd.remote.gateway", message)
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
                    raise from_wire(answer.error)
                assert isinstance(answer, Status)
                return process, answer

    def stop(self, text: str) -> None:
        """As the supervisor does on SIGTERM."""
        for _, channel in self._children:
            with contextlib.suppress(ChannelClosed):
                channel.send(Stop(text))

    def close(self) -> None:
        for process, channel in self._children:
            process.kill()
            process.wait()
            channel.close()
        self._listener.close()


def wait_until(is_so: Callable[[], object], limit_s: float = 20.0) -> None:
    """Look again and again; for what no event tells of: another process's memory, files, threads."""
    for _ in range(round(limit_s / 0.05)):
        if is_so():
            return
        select.select([], [], [], 0.05)
    raise AssertionError("it did not come about")
