"""A process of ``loaderd serve --listen``: ``RowsApp`` under uvicorn, which has TLS and the graceful end.

The supervisor gives it a socket, at which all of its processes listen. It imports the modules of the data sets, opens
them unless that takes long and no other process serves, and says that it is ready. At Drain or Stop it takes no more
connections, and ends what it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import select
import socket
import ssl
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
import uvloop

from loaderd import logs
from loaderd.daemon.catalog import imported_datasets
from loaderd.daemon.indexing.shard_manifest import Manifests
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import die_with_parent, enter_process, name_process
from loaderd.ipc.messages import AskStatus, Drain, Failed, Serve, Status, Stop
from loaderd.restarts import Backoff
from loaderd.serve.app import RowsApp
from loaderd.serve.counters import Counters
from loaderd.serve.datasets import ServedDataset
from loaderd.serve.deaths import Deaths
from loaderd.serve.guarded_http import GuardedHttp, serve_pages
from loaderd.serve.replies import HealthPages

_KEEP_ALIVE_S = 60
_HANDSHAKE_S = 10.0
_TICK_S = 1.0
_LAST_STATUS_S = 2.0
_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0
_OPENERS = 4
_OPEN_FIRST_S = 2.0
"""Consumers wait for so long at the socket rather than be told to ask again; where others serve, for any time."""
_FAILED_STATUS = 1

_logger = logging.getLogger("loaderd")


def _path_of(fd: int) -> str:
    """A path of what is open: who opens it has an offset, and locks, of its own."""
    return f"/proc/self/fd/{fd}"


def _file_of(content: bytes | None) -> str | None:
    """The path of a file with ``content``, in memory."""
    if content is None:
        return None
    fd = os.memfd_create("loaderd-pem")
    os.pwrite(fd, content, 0)
    return _path_of(fd)


class _Loop(uvloop.Loop):
    """Ends TLS handshakes that take long: uvicorn cannot be told to."""

    async def create_server(self, *arguments: Any, **options: Any) -> Any:
        if options.get("ssl"):
            options["ssl_handshake_timeout"] = _HANDSHAKE_S
        return await super().create_server(*arguments, **options)


class HttpServer:
    """``fds``: what came with the message Serve (``supervisor.HttpSupervisor``)."""

    def __init__(self, channel: Channel, settings: dict[str, Any], fds: dict[str, int]) -> None:
        self._channel = channel
        self._settings = settings
        self._fds = fds
        logs.configure(settings["log_format"], "http")
        uvicorn_logger = logging.getLogger("uvicorn.error")
        uvicorn_logger.handlers, uvicorn_logger.propagate = logging.getLogger("loaderd").handlers, False
        uvicorn_logger.setLevel(logging.ERROR)
        self._counters = Counters(fds["shared"])
        openers = ThreadPoolExecutor(_OPENERS, thread_name_prefix="open")
        manifests = None if settings["manifests"] is None else Manifests(settings["manifests"])
        imported = imported_datasets(settings["targets"])
        self._datasets = {
            name: ServedDataset(name, target, dataset, openers, manifests)
            for target, (name, dataset) in zip(settings["targets"], imported.items(), strict=True)
        }
        limit = settings["max_bandwidth"]
        bytes_per_s = None if limit is None else limit / settings["workers"]
        deaths = Deaths(fds["tickets"], settings["place"])
        self._app = RowsApp(
            self._datasets, settings["tokens"], self._counters, deaths, bytes_per_s, settings["expires_s"]
        )
        GuardedHttp.max_connections = settings["max_connections"]
        GuardedHttp.on_refused = staticmethod(self._counters.refused)
        pems = {name: _file_of(settings[name]) for name in ("tls_cert", "tls_key", "tls_client_ca")}
        config = uvicorn.Config(
            self._app,
            http=GuardedHttp,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, math.ceil(settings["grace"])),
            ssl_certfile=pems["tls_cert"],
            ssl_keyfile=pems["tls_key"],
            ssl_ca_certs=pems["tls_client_ca"],
            ssl_cert_reqs=ssl.CERT_REQUIRED if pems["tls_client_ca"] else ssl.CERT_NONE,
        )
        config.load()
        self._server = uvicorn.Server(config)

    async def run(self) -> None:
        """Serve until Drain or Stop."""
        opened = [asyncio.Event() for _ in self._datasets]
        opening = map(self._open, self._datasets.values(), opened)
        tasks = [asyncio.ensure_future(each) for each in (*opening, self._tick())]
        with contextlib.suppress(asyncio.TimeoutError):
            limit_s = None if self._settings["others_serve"] else _OPEN_FIRST_S
            await asyncio.wait_for(asyncio.gather(*(each.wait() for each in opened)), limit_s)
        if "health" in self._fds:
            pages = HealthPages(self._app.health_pages)
            await serve_pages(pages, socket.socket(fileno=self._fds["health"]))
        name_process("loaderd-http")
        self._tell()
        asyncio.get_running_loop().add_reader(self._channel, self._hear)
        await self._server.serve([socket.socket(fileno=self._fds["listen"])])
        for task in tasks:
            task.cancel()
        self._app.tick()
        self._tell()  # what was counted since the last question
        until_s = time.monotonic() + _LAST_STATUS_S
        with contextlib.suppress(ChannelClosed):
            while self._channel.has_posted and (left_s := until_s - time.monotonic()) > 0:
                select.select([], [self._channel], [], left_s)
                self._channel.flush()

    def _tell(self) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.post(Status(self._counters.to_wire()))

    def _hear(self) -> None:
        try:
            for message in self._channel.receive():
                if isinstance(message, AskStatus):
                    self._tell()
                elif isinstance(message, Drain | Stop):
                    self._server.should_exit = True
        except ChannelClosed:  # the supervisor is gone
            os._exit(_FAILED_STATUS)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._app.tick()
            with contextlib.suppress(ChannelClosed):
                self._channel.flush()

    async def _open(self, dataset: ServedDataset, tried: asyncio.Event) -> None:
        """Open a data set, again and again if that fails: storage may come back, or missing shards be added."""
        retries = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            try:
                async with self._alone():
                    await dataset.open_current()
            except Exception as error:
                error = _as_ours(error)
                if dataset.current is None:
                    dataset.error = error
                _logger.error("data set %s: %s", dataset.name, error)
            tried.set()
            if dataset.current is not None:
                data = dataset.current.opened.data
                _logger.info("data set %s is ready: %d records", dataset.name, data.rows.num_records)
                if data.left_out:
                    _logger.warning("%s: %s", dataset.name, data.left_out)
                return
            await asyncio.sleep(retries.next_s())

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One process makes the indexes, while the others wait for it, and then take what it has kept."""
        with open(_path_of(self._fds["shared"]), "rb+") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            yield


def _as_ours(error: Exception) -> LoaderdError:
    if isinstance(error, LoaderdError):
        return error
    return DaemonError(f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))


def main() -> None:
    """Entry point of the process."""
    sock, parent = enter_process("loaderd-starts")
    die_with_parent(parent)
    channel = Channel(sock)
    loop = _Loop()
    asyncio.set_event_loop(loop)
    try:
        while not (messages := channel.receive()):
            continue
        serve = messages[0]
        assert isinstance(serve, Serve)
        server = HttpServer(channel, serve.settings, {name: channel.take_fd() for name in serve.settings["fds"]})
        loop.run_until_complete(server.run())
    except ChannelClosed:
        os._exit(_FAILED_STATUS)
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            channel.send(Failed(_as_ours(error)))
        os._exit(_FAILED_STATUS)
    os._exit(0)  # threads may wait for storage, or for a user's function
