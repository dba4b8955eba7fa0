"""``loaderd serve``: the server's first process owns the listening socket, and keeps processes running that serve.

::

    supervisor ─┬─ process    --unix: one daemon, which has the workers. --listen: several of ``http_server``.
                │             Each imports the data sets, and accepts consumers at the socket
                └─ process    after SIGHUP: the next ones. When all of them are ready, they replace the first ones,
                              which end when they have ended what they began: a daemon, when its last consumer has
                              left; a process of the HTTP server, after its last answer

It is one event loop for signals (SIGCHLD is among them), for what processes say, and for timers. It runs no code of
the user's, which could bring it down. The listening socket outlives the processes: while none runs, consumers wait in
its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

from loaderd.daemon.catalog import TYPICAL_BATCH_SIZE
from loaderd.daemon.totals import Totals
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.messages import AskStatus, Drain, Failed, Message, Serve, Status, Stop
from loaderd.ipc.spawn import has_ended, kill_group, start_process
from loaderd.options import default_workers
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.restarts import RestartPolicy
from loaderd.serve.counters import Readers, write_shared
from loaderd.serve.deaths import STUCK_STATUS, Deaths
from loaderd.serve.options import Address, HttpOptions, ServerOptions, UnixOptions, manifest_folder
from loaderd.serve.unix_socket import UnixSocket
from loaderd.version import VERSION

_TICK_S = 1.0
_SAY_STARTING_S = 30
_ANSWERS_WITHIN_S = 5.0
_MAX_STARTS_IN_VAIN = 3
_MAX_HEALTH_CONNECTIONS = 32

_logger = logging.getLogger("loaderd")


class _Process:
    """``what``: in words. ``place``: no other process has it now. Raises DaemonError if it cannot be started."""

    def __init__(self, what: str, module: str, place: int, policy: RestartPolicy) -> None:
        self.process, sock = start_process(module)
        self.channel = Channel(sock)
        self.place = place
        self.policy = policy
        """When to start another one in its place."""
        self.role: Literal["serving", "next", "leaving"] = "serving"
        self.report: dict[str, Any] = {}
        """Of its last Status; empty while it starts."""
        self.error: LoaderdError | None = None
        """Why it gave up, if it said so."""
        self.silent_s = 0
        """For how many seconds the last question, or the first message, has had no answer."""
        self._what = what
        self._is_asked = True  # the first message, Serve, is answered with a Status, too

    def __str__(self) -> str:
        return f"{self._what} {self.process.pid}"

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """If the process has ended, nothing is raised: the supervisor notices that elsewhere."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(message, fds)

    def ask(self) -> None:
        """To be called once a second: asks for a Status, unless the last question is unanswered."""
        if self._is_asked:
            self.silent_s += 1
        else:
            self._is_asked = True
            self.send(AskStatus())

    def receive(self) -> None:
        """Raises ChannelClosed."""
        for message in self.channel.receive():
            if isinstance(message, Status):
                self.report, self.silent_s, self._is_asked = message.report, 0, False
            elif isinstance(message, Failed):
                self.error = message.error

    def kill(self) -> None:
        kill_group(self.process)

    def end(self, message: Message) -> None:
        """Have it end what it has begun: nothing, if it is still starting."""
        self.role = "leaving"
        if self.report:
            self.send(message)
        else:
            self.kill()

    def close(self) -> str:
        """Read the last messages of a process that has ended; returns how it ended, in words."""
        self.kill()  # what it has started
        how = how_it_ended(self.process.wait())
        with contextlib.suppress(ChannelClosed):
            while select.select([self.channel], [], [], 0)[0]:  # not to its end: forks of it may keep it open
                self.receive()
        self.channel.close()
        return how


class Supervisor(ABC):
    """``what``: each of its processes, in words; ``module``: whose ``main`` they run; ``_fds``: what they get.

    ``max_pause_s``: before one is started again.
    """

    what: str
    module: str
    max_pause_s: float
    _fds: dict[str, int]
    _socket: UnixSocket | socket.socket

    def __init__(self, options: ServerOptions, num_processes: int) -> None:
        self._options = options
        self._num_processes = num_processes
        self._processes: list[_Process] = []
        self._has_served = self._has_failed = False
        self._manifests = manifest_folder(options.state)
        self._shards: dict[str, str] = {}
        """The keys of the manifests that a daemon has, by data set, for the one that takes its place."""
        self._ended = Totals()
        """Of processes that have ended."""
        self._ended.add("restarts", "", self.what, 0)
        self._stopping = ""
        self._settings = self._next_settings = self._read_settings()
        """Of the processes that serve, and of those that are to be the next."""

    def run(self) -> bool:
        """Serve until a signal has ended all processes. Returns False if the server gave up by itself."""
        asyncio.run(self._run())
        _logger.info("the server has ended")
        return not self._has_failed

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a daemon says what it waits for; it would end this process
        _logger.info("loaderd %s imports %s", VERSION, ", ".join(self._options.targets))
        try:
            await self._serve_health()
            self._loop.call_later(_TICK_S, self._tick)
            for _ in range(self._num_processes):
                self._start_again(self._new_policy())
            await self._over.wait()
        finally:
            for process in self._processes:
                process.close()
            self._socket.close()

    # ---------------------------------------------------------------------------------- kinds of servers

    def _read_settings(self) -> dict[str, Any]:
        """What processes get with Serve: as files are now, until the next reload. Raises LoaderdError."""
        settings = {name: value for name, value in vars(self._options).items() if not isinstance(value, Address)}
        return {**settings, "manifests": self._manifests}

    @abstractmethod
    async def _serve_health(self) -> None: ...

    @property
    @abstractmethod
    def _address(self) -> str:
        """For ``loaderd.connect``."""

    def _say_how_to_connect(self) -> None:
        name = self._options.targets[0].partition(":")[2]
        call = f'loaderd.connect("{self._address}", dataset="{name}", batch_size={TYPICAL_BATCH_SIZE})'
        note = f"  # with the token in {TOKEN_VARIABLE}" if self._settings.get("tokens") else ""
        _logger.info("connect with %s%s", call, note)

    # ----------------------------------------------------------------------------------------------- end

    def _end(self, number: signal.Signals) -> None:
        if self._stopping:
            _logger.warning("%s again: processes that still run are killed", signal.Signals(number).name)
            self._kill_all()
        else:
            why = f"the server ends ({signal.Signals(number).name})"
            _logger.info("%s; processes that still run in %g s are killed", why, self._options.grace)
            self._stop(why)

    def _give_up(self, error: LoaderdError) -> None:
        self._has_failed = True
        _logger.critical("the server gives up: %s", error)
        self._stop(f"the server gives up: {error.message}")

    def _stop(self, why: str) -> None:
        """Tell all processes to end; those that have not after ``grace`` seconds are killed."""
        self._stopping = why
        self._socket.close()  # a consumer that connects now is refused, and may try again
        _tell_systemd("STOPPING=1")
        for process in self._processes:
            process.end(Stop(why))
        self._loop.call_later(self._options.grace, self._kill_all)
        self._end_if_done()

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()

    def _end_if_done(self) -> None:
        if self._stopping and not self._processes:
            self._over.set()

    # -------------------------------------------------------------------------------------------- reload

    def _of_role(self, role: str) -> list[_Process]:
        return [process for process in self._processes if process.role == role]

    def _reload(self) -> None:
        """Start the next processes, which import the modules again."""
        if self._stopping:
            return
        self._kill_next()  # they may have read old files, and they may hang
        _logger.info("reload: another %s is started%s", self.what, " in each place" * (self._num_processes > 1))
        _tell_systemd("RELOADING=1")  # READY=1 comes when they serve, or have ended
        try:
            self._next_settings = self._read_settings()
            for _ in range(self._num_processes):
                self._start(self._new_policy(), self._next_settings, {}).role = "next"
        except (LoaderdError, OSError) as error:  # a file may be gone that was just checked
            self._reload_failed(error)

    def _kill_next(self) -> None:
        for process in self._of_role("next"):
            process.role = "leaving"
            process.kill()

    def _reload_failed(self, error: Exception) -> None:
        self._kill_next()
        _logger.error("reload failed, the server goes on as it was: %s", error)
        _tell_systemd("READY=1")

    def _promote(self) -> None:
        """The next processes are ready: have them replace the current ones."""
        before, processes = self._of_role("serving"), self._of_role("next")
        for process in processes:
            process.role = "serving"
        self._settings, self._shards = self._next_settings, {}
        new, old = (", ".join(map(str, these)) for these in (processes, before))
        _logger.info("reloaded: %s serves now, in place of %s", new, old or "none")
        for process in before:
            process.end(Drain())

    # --------------------------------------------------------------------------------------- processes

    @property
    def _is_serving(self) -> bool:
        return any(process.report for process in self._of_role("serving"))

    def _new_policy(self) -> RestartPolicy:
        return RestartPolicy(_MAX_STARTS_IN_VAIN, self.max_pause_s)

    def _start(self, policy: RestartPolicy, settings: dict[str, Any], shards: dict[str, str]) -> _Process:
        """Start a process. Raises DaemonError."""
        places = {each.place for each in self._processes}
        place = next(place for place in count() if place not in places)
        process = _Process(self.what, self.module, place, policy)
        policy.began()
        now = {"current": shards, "others_serve": self._is_serving, "place": place, "fds": list(self._fds)}
        process.send(Serve({**settings, **now}), tuple(self._fds.values()))
        self._processes.append(process)
        self._loop.add_reader(process.channel, self._hear, process, self._has_served)
        return process

    def _start_again(self, policy: RestartPolicy) -> None:
        if not self._stopping and len(self._of_role("serving")) < self._num_processes:
            try:
                self._start(policy, self._settings, self._shards)
            except DaemonError as error:
                self._restart_later(policy, error)

    def _hear(self, process: _Process, takes_over: bool) -> None:
        """``takes_over``: others have served before."""
        is_first = not process.report
        try:
            process.receive()
        except ChannelClosed:  # the process is ending: it is lost when it has
            self._loop.remove_reader(process.channel)
            return
        if not process.report or process.role == "leaving":
            return
        if process.role == "next":
            if not all(each.report for each in self._of_role("next")):
                return
            self._promote()
        elif is_first and takes_over:
            _logger.info("%s serves now", process)
        if not self._has_served:
            self._has_served = True
            self._say_how_to_connect()
        datasets = process.report.get("datasets", ())
        self._shards |= {each["name"]: each["manifest"] for each in datasets if each["manifest"]}
        if is_first:
            _tell_systemd("READY=1")

    def _reap(self) -> None:
        for process in [each for each in self._processes if has_ended(each.process)]:
            self._lose(process)

    def _lose(self, process: _Process) -> None:
        """A process has ended: clean up after it, and replace it if it is still needed."""
        self._loop.remove_reader(process.channel)
        how = process.close()
        self._processes.remove(process)
        self._ended.add_wire(process.report.get("totals", ()))
        error = process.error or DaemonError(f"{process} {how}")
        if process.role == "next":
            self._reload_failed(error)
        elif process.role == "serving" and process.error is not None and not self._has_served:
            self._give_up(error)  # the next one would fail in the same way
        elif process.role == "serving":
            self._restart_later(process.policy, error, has_served=bool(process.report))
        elif process.report and not self._stopping:
            _logger.info("%s, which was replaced, %s", process, how)
        self._end_if_done()

    def _restart_later(self, policy: RestartPolicy, error: LoaderdError, has_served: bool = False) -> None:
        """Start another process after a pause; or give up, if too many in a row never served, and no other does."""
        if has_served:
            policy.achieved()
        elif policy.ended_in_vain() and not self._is_serving:
            self._give_up(error)
            return
        self._ended.add("restarts", "", self.what, 1)
        pause_s = policy.pause_s()
        self._loop.call_later(pause_s, self._start_again, policy)
        _logger.error("%s; another %s starts in %.1f s", error.message, self.what, pause_s)

    def _tick(self) -> None:
        self._loop.call_later(_TICK_S, self._tick)
        for process in self._processes:
            process.ask()
            if not process.report and process.silent_s and process.silent_s % _SAY_STARTING_S == 0:
                _logger.warning("%s has been starting for %d s", process, process.silent_s)
            if process.report and process.silent_s > self._options.watchdog and not self._stopping:
                _logger.error("%s has said nothing for %d s and is killed", process, process.silent_s)
                process.kill()
        if "WATCHDOG_USEC" in os.environ:
            _tell_systemd("WATCHDOG=1")


def _tell_systemd(state: str) -> None:
    """Send a line such as "READY=1" to $NOTIFY_SOCKET (sd_notify), for units of ``Type=notify``."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), socket.MSG_DONTWAIT, address)  # a busy systemd must not stop a server


class UnixSupervisor(Supervisor):
    """Keeps a daemon at a Unix socket. Raises ServerError or OptionError if it cannot listen as the options say."""

    what, module, max_pause_s = "daemon", "loaderd.daemon.server_daemon", 5.0
    _options: UnixOptions
    _socket: UnixSocket

    def __init__(self, options: UnixOptions) -> None:
        self._socket = UnixSocket(options.unix)
        self._fds = {"listen": self._socket.fileno()}
        try:
            super().__init__(options, num_processes=1)
            if options.health is not None:
                _require_server_extra()
                self._health = options.health.bound("--health")
        except BaseException:
            self._socket.close()
            raise

    @property
    def _address(self) -> str:
        return f"unix://{self._socket.path}"

    async def _serve_health(self) -> None:
        if self._options.health is None:
            return
        from loaderd.serve.guarded_http import GuardedHttp, serve_pages
        from loaderd.serve.replies import HealthPages, health_reply, metrics_reply

        GuardedHttp.max_connections = _MAX_HEALTH_CONNECTIONS
        pages = {
            "/livez": lambda: health_reply(""),
            "/readyz": lambda: health_reply(self._why_not_ready()),
            "/metrics": lambda: metrics_reply(self._samples()),
        }
        await serve_pages(HealthPages(pages), self._health)
        _say_where_health_is(self._options.health, self._health)

    def _samples(self) -> Any:
        from loaderd.serve.metrics import samples

        reports = [each.report for each in self._processes if each.report]
        totals = self._ended.copy()
        for report in reports:
            totals.add_wire(report["totals"])
        return samples(not self._why_not_ready(), reports, totals)

    def _why_not_ready(self) -> str:
        from loaderd.serve.replies import why_not_ready

        daemon = next((each for each in self._of_role("serving") if each.report), None)
        if self._stopping or daemon is None:
            return self._stopping or "the daemon is starting"
        if daemon.silent_s > _ANSWERS_WITHIN_S:
            return f"the daemon has said nothing for {daemon.silent_s} s"
        return why_not_ready(daemon.report["datasets"])


def _require_server_extra() -> None:
    """Raise ModuleNotFoundError for what is missing of it."""
    for needed in ("uvicorn", "uvloop", "httptools", "prometheus_client"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(name=needed)


def _say_where_health_is(address: Address, sock: socket.socket) -> None:
    where = Address(address.host, sock.getsockname()[1])
    _logger.info("health: http://%s/readyz (and /livez, /metrics)", where)


class HttpSupervisor(Supervisor):
    """Keeps processes of ``http_server`` at a port. Raises ServerError or OptionError if it cannot listen.

    All of them have the tokens and certificates that there were at the start, or at the last reload. Each can show
    what all have counted, and knows of which tickets others have died: this process adds that up once a second.
    """

    what, module, max_pause_s = "http process", "loaderd.serve.http_server", 0.5
    """A record that kills processes kills some of them before it is known."""
    _options: HttpOptions
    _socket: socket.socket

    def __init__(self, options: HttpOptions) -> None:
        _require_server_extra()
        super().__init__(options, options.workers or default_workers())
        self._socket = options.listen.bound("--listen")
        self._health = None if options.health is None else options.health.bound("--health")
        self._shared_fd, self._deaths = os.memfd_create("loaderd-shared"), Deaths()
        self._fds = {"listen": self._socket.fileno(), "shared": self._shared_fd, "tickets": self._deaths.fd}
        if self._health is not None:
            self._fds["health"] = self._health.fileno()
        self._readers = Readers()
        """Of processes that have ended."""
        self._started_s = self._counted_s = time.time()
        self._publish()

    async def _serve_health(self) -> None:
        """Each process does."""

    def _read_settings(self) -> dict[str, Any]:
        options = self._options
        for warning in options.warnings():
            _logger.warning("%s", warning)
        secrets = {"tokens": options.tokens(), "expires_s": options.expires_s()}
        settings = {**super()._read_settings(), **secrets, "workers": self._num_processes}
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            if settings[name] is not None:
                settings[name] = Path(settings[name]).read_bytes()
        return settings

    @property
    def _address(self) -> str:
        host, port = self._options.listen.host, self._socket.getsockname()[1]
        where = Address(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)
        return f"{'https' if self._options.tls_cert else 'http'}://{where}"

    def _say_how_to_connect(self) -> None:
        super()._say_how_to_connect()
        options = self._options
        if self._health is not None and options.health is not None:
            _say_where_health_is(options.health, self._health)
        if not (self._settings["tokens"] or options.tls_client_ca):
            who = "every user of this machine" if options.listen.is_loopback else "anybody who can connect"
            _logger.warning("without a token, %s can read the data sets", who)
        elif not (options.tls_cert or options.listen.is_loopback):
            _logger.warning("without TLS, whoever sees the traffic can read the data sets and the token")

    def _lose(self, process: _Process) -> None:
        was_serving = process.role == "serving"
        super()._lose(process)
        is_death = was_serving and process.process.returncode != STUCK_STATUS
        self._deaths.record_end(process.place, is_death)
        self._readers.add_wire(process.report.get("readers", ()))
        self._publish()

    def _tick(self) -> None:
        self._publish()  # the reports are answers to the questions of the tick before
        self._counted_s = time.time()
        super()._tick()

    def _publish(self) -> None:
        totals, readers = self._ended.copy(), Readers(self._readers.to_wire())
        for process in self._processes:
            totals.add_wire(process.report.get("totals", ()))
            readers.add_wire(process.report.get("readers", ()))
        times = {"started_s": self._started_s, "counted_s": self._counted_s}
        sums = {"totals": totals.to_wire(), "readers": readers.to_wire()}
        write_shared(self._shared_fd, {**times, **sums})
