"""``loaderd serve --listen``: the processes of the HTTP server.

::

    loaderd serve ──uvicorn's supervisor──┬── process 1 ── RowsApp    each listens at the same socket
      owns the socket, restarts what dies └── process N ── RowsApp

uvicorn has the processes, TLS and the graceful end. SIGHUP starts other processes, which import the modules of the
data sets again, list the shards anew, and read tokens and certificates. Each takes an old one's place when it is
ready, and the old one ends what it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from loaderd import logs
from loaderd.daemon.catalog import TYPICAL_BATCH_SIZE, imported_datasets
from loaderd.daemon.indexing.shard_manifest import Manifests
from loaderd.errors import LoaderdError
from loaderd.ipc.child import die_with_parent, name_process
from loaderd.machine import raise_max_open_files
from loaderd.options import default_workers
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.restarts import Backoff
from loaderd.serve.app import RowsApp
from loaderd.serve.bandwidth import Bandwidth
from loaderd.serve.certificates import check_secrets, expiry_of
from loaderd.serve.counters import FOLDER_VARIABLE, Counters
from loaderd.serve.datasets import ServedDataset
from loaderd.serve.deaths import Deaths
from loaderd.serve.guarded_http import GuardedHttp, bound, serve_pages
from loaderd.serve.opening import OpenData
from loaderd.serve.options import Address, HttpOptions, manifest_folder
from loaderd.serve.replies import HealthPages, Receive, Scope, Send

_KEEP_ALIVE_S = 60
_TICK_S = 1.0
_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0
_OPENERS = 4
_FAILED_START_S = 1.0
_OPENED_TICK_S = 0.05
_FOLDERS = "loaderd-http-"
_LOCK = "lock"

_spawn = multiprocessing.get_context("spawn")
_logger = logging.getLogger("loaderd")


@dataclass
class ProcessApp:
    """What uvicorn runs in each process: it is pickled there.

    ``parent``: the supervisor's process. ``folder``: for counters, and a lock.
    """

    options: HttpOptions
    parent: int
    cwd: str
    folder: str
    num_processes: int
    health: socket.socket | None
    is_replacement: bool = False
    """Whether other processes serve: then this one does not until its data sets are ready, or have failed once."""
    _app: RowsApp | None = field(default=None, repr=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._start()
        except LoaderdError as error:
            _logger.critical("%s", error)
            if self.is_replacement:  # uvicorn would end the others, which serve: have it try again instead
                await asyncio.sleep(_FAILED_START_S)
                os._exit(1)
            await send({"type": "lifespan.startup.failed", "message": ""})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        if self._app is not None:
            self._app.deaths.leave()
        os._exit(0)  # threads may wait for storage, or for a user's function

    async def _start(self) -> None:
        die_with_parent(self.parent)
        name_process("loaderd-http")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal sends it to all; it is for the supervisor
        raise_max_open_files()
        os.chdir(self.cwd)
        logs.configure(self.options.log_format, "http")
        uvicorn_logger = logging.getLogger("uvicorn.error")
        uvicorn_logger.handlers, uvicorn_logger.propagate = logging.getLogger("loaderd").handlers, False
        uvicorn_logger.setLevel(logging.ERROR)
        folder = manifest_folder(self.options.state)
        manifests = None if folder is None else Manifests(folder)
        openers = ThreadPoolExecutor(_OPENERS, thread_name_prefix="open")
        imported = imported_datasets(self.options.targets)
        datasets = {
            name: ServedDataset(name, target, dataset, openers, manifests)
            for target, (name, dataset) in zip(self.options.targets, imported.items(), strict=True)
        }
        options, counters = self.options, Counters()
        limit = options.max_bandwidth
        bandwidth = None if limit is None else Bandwidth(limit / self.num_processes)
        self._app = RowsApp(datasets, options.tokens(), counters, Deaths(self.folder), bandwidth)
        if options.tls_cert is not None:
            self._app.expires_s = expiry_of(options.tls_cert)
        GuardedHttp.max_connections = options.max_connections
        GuardedHttp.on_refused = staticmethod(counters.refused)
        opening = [asyncio.ensure_future(self._open(each)) for each in datasets.values()]
        while self.is_replacement and any(each.current is None and each.error is None for each in datasets.values()):
            await asyncio.sleep(_OPENED_TICK_S)
        self._tasks = [*opening, asyncio.ensure_future(self._tick())]
        if self.health is not None:
            await serve_pages(HealthPages(self._app.pages), self.health)

    async def _open(self, dataset: ServedDataset) -> None:
        """Open a data set, again and again if that fails: storage may come back, or missing shards be added."""
        retries = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            try:
                async with self._alone():
                    await dataset.open_current()
            except LoaderdError as error:
                _logger.error("data set %s: %s", dataset.name, error)
                if dataset.current is not None:
                    return
            else:
                data = dataset.current.opened.data if dataset.current else None
                assert data is not None
                _logger.info("data set %s is ready: %d records", dataset.name, data.rows.num_records)
                if data.left_out:
                    _logger.warning("%s: %s", dataset.name, data.left_out)
                return
            await asyncio.sleep(retries.next_s())

    @contextlib.asynccontextmanager
    async def _alone(self) -> Any:
        """One process makes the indexes, while the others wait for it, and then take what it has kept."""
        with open(os.path.join(self.folder, "indexing"), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.05)
            yield

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            assert self._app is not None
            self._app.tick()


class _Supervisor(Multiprocess):
    """uvicorn's. At a reload, a process first imports the modules and makes the indexes, which may take long; then
    the processes that serve are replaced, one after another."""

    def __init__(self, app: ProcessApp, config: uvicorn.Config, sock: socket.socket) -> None:
        super().__init__(config, [sock])
        self._app = app
        self._reload: SpawnProcess | None = None

    def init_processes(self) -> None:
        super().init_processes()
        self._app.is_replacement = True

    def handle_hup(self) -> None:
        """Check what new processes would read, so that none of the old ones ends for those that cannot start."""
        options = self._app.options
        try:
            warnings = check_secrets(options, options.tokens())
        except LoaderdError as error:
            _logger.error("reload failed, the server goes on as it was: %s", error)
            return
        for warning in warnings:
            _logger.warning("%s", warning)
        if self._reload is None:
            _logger.info("reload: the modules are imported, and the shards listed")
            self._reload = _spawn.Process(target=_open_once, args=(options, self._app.parent, self._app.cwd))
            self._reload.start()

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        if self._reload is None or self._reload.is_alive():
            return
        code, self._reload = self._reload.exitcode, None
        if code:
            _logger.error("reload failed, the server goes on as it was")
            return
        self.restart_all()
        _logger.info("reloaded; the processes are now %s", ", ".join(str(each.pid) for each in self.processes))


def _open_once(options: HttpOptions, parent: int, cwd: str) -> None:
    """Import the modules, and make and keep the indexes of the shards. Exits with 1 where that fails."""
    die_with_parent(parent)
    os.chdir(cwd)
    logs.configure(options.log_format, "reload")
    try:
        for name, dataset in imported_datasets(options.targets).items():
            OpenData(dataset, name)
    except LoaderdError as error:
        _logger.error("%s", error)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _remove_stale() -> None:
    """Remove the folders of this user's servers that were killed: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with open(folder / _LOCK, "rb+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _counters_folder() -> Iterator[str]:
    _remove_stale()
    folder = tempfile.mkdtemp(prefix=_FOLDERS)
    os.environ[FOLDER_VARIABLE] = folder
    with open(os.path.join(folder, _LOCK), "wb") as lock:  # a pid would say nothing to a server in another container
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def serve(options: HttpOptions) -> bool:
    """Serve until SIGTERM or Ctrl-C; False if the processes cannot start. Raises LoaderdError if it cannot listen."""
    for warning in check_secrets(options, options.tokens()):
        _logger.warning("%s", warning)
    processes = options.workers or default_workers()
    sock = bound(options.listen, "--listen")
    health = None if options.health is None else bound(options.health, "--health")
    _announce(options, sock, health)
    with _counters_folder() as folder:
        app = ProcessApp(options, os.getpid(), os.getcwd(), folder, processes, health)
        config = uvicorn.Config(
            app,
            workers=processes,
            loop="uvloop",
            http=GuardedHttp,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(options.grace)),
            timeout_worker_healthcheck=int(options.watchdog),
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            ssl_ca_certs=options.tls_client_ca,
            ssl_cert_reqs=ssl.CERT_REQUIRED if options.tls_client_ca else ssl.CERT_NONE,
        )
        # A process of multiprocessing begins with a sys.path that has the working directory first, in which anybody
        # may have left a module; the app goes back there.
        os.chdir("/")
        supervisor = _Supervisor(app, config, sock)
        supervisor.run()
    _logger.info("the server has ended")
    return not any(each.exitcode == STARTUP_FAILURE for each in supervisor.processes)


def _announce(options: HttpOptions, sock: socket.socket, health: socket.socket | None) -> None:
    """Log how to connect, with the actual port."""
    listen = options.listen
    host = socket.gethostname() if listen.host in ("0.0.0.0", "::") else listen.host
    address = f"{'https' if options.tls_cert else 'http'}://{Address(host, sock.getsockname()[1])}"
    note = f"  # with the token in {TOKEN_VARIABLE}" if options.tokens() else ""
    name = options.targets[0].partition(":")[2]
    call = f'loaderd.connect("{address}", dataset="{name}", batch_size={TYPICAL_BATCH_SIZE})'
    _logger.info("connect with %s%s", call, note)
    if health is not None and options.health is not None:
        where = Address(options.health.host, health.getsockname()[1])
        _logger.info("health: http://%s/readyz (and /livez, /metrics)", where)
    if not (options.tls_cert and options.tokens()):
        who = "every user of this machine" if listen.is_loopback else "anybody who can connect"
        _logger.warning("without TLS and a token, %s can read the data sets", who)
