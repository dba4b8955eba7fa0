"""``loaderd serve``: the server's first process owns the listening socket, and keeps processes running that serve.

::

    supervisor ─┬─ process    --unix: one daemon, which has the workers. --listen: several of ``http_server``.
                │             Each imports the data sets, and accepts consumers at the socket
                └─ process    after SIGHUP: the next ones. When all of them are ready, they replace the first ones,
                              which end when they have ended what they began: a daemon, when its last consumer has
                              left; a process of the HTTP server, after its last answer

The supervisor waits in ``select`` for signals (Python writes their numbers into a socket; SIGCHLD is among them) and
for its processes. It runs no code of the user's, which could bring it down. The listening socket outlives the
processes: while none runs, consumers wait in its queue.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from loaderd.daemon.catalog import TYPICAL_BATCH_SIZE
from loaderd.daemon.totals import Totals
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.messages import AskStatus, Drain, Failed, Message, Serve, Status, Stop
from loaderd.ipc.spawn import exit_status, has_ended, kill_group, start_process
from loaderd.options import default_workers
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.restarts import RestartPolicy
from loaderd.serve import systemd
from loaderd.serve.certificates import check_secrets, expiry_of
from loaderd.serve.counters import Readers
from loaderd.serve.deaths import STUCK_STATUS, DeathRecords
from loaderd.serve.options import Address, HttpOptions, ServerOptions, UnixOptions, manifest_folder
from loaderd.serve.shared_value import SharedValue
from loaderd.serve.unix_socket import UnixSocket
from loaderd.version import VERSION

_TICK_S = 1.0
_ANSWERS_WITHIN_S = 5.0
_MAX_STARTS_IN_VAIN = 3
_MAX_HEALTH_CONNECTIONS = 32

_logger = logging.getLogger("loaderd")


class _Process:
    """Is to serve. ``what``: in words. ``place``: no other has it now. Raises DaemonError if it cannot be started."""

    def __init__(self, what: str, module: str, place: int) -> None:
        self.process, sock = start_process(module)
        self.channel = Channel(sock)
        self.place = place
        self.report: dict[str, Any] = {}
        """Of its last Status; empty while it starts."""
        self.error: LoaderdError | None = None
        """Why it gave up, if it said so."""
        self.silent_s = 0.0
        """For how many seconds the last question, or the first message, has had no answer."""
        self.patience_s = 30.0
        """After so many silent seconds, the log says that it is still starting."""
        self.takes_over = self.is_replaced = False
        """From others, that have served; by others, that serve now."""
        self._what = what
        self._is_asked = True  # the first message, Serve, is answered with a Status, too

    def __str__(self) -> str:
        return f"{self._what} {self.process.pid}"

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """If the process has ended, nothing is raised: the supervisor notices that elsewhere."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(message, fds)

    def ask(self, passed_s: float) -> None:
        """Ask for a Status; or, while the last question is unanswered, add ``passed_s`` to ``silent_s``."""
        if self._is_asked:
            self.silent_s += passed_s
        else:
            self._is_asked = True
            self.send(AskStatus())

    def receive(self) -> None:
        """Raises ChannelClosed."""
        for message in self.channel.receive():
            if isinstance(message, Status):
                self.report, self.silent_s, self._is_asked = message.report, 0.0, False
            elif isinstance(message, Failed):
                self.error = message.error

    def end(self, message: Message) -> None:
        """Have it end what it has begun: nothing, if it is still starting."""
        if self.report:
            self.send(message)
        else:
            kill_group(self.process)

    def close(self) -> str:
        """Kill the process if it lives, read its last messages; returns how it ended, in words."""
        kill_group(self.process)
        how = how_it_ended(self.process.wait())
        with contextlib.suppress(ChannelClosed):
            while select.select([self.channel], [], [], 0)[0]:  # not to its end: forks of it may keep it open
                self.receive()
        self.channel.close()
        return how


@dataclass
class _Seat:
    """Where a process is to run. ``due_s``: when to start one (monotonic); None: one runs."""

    policy: RestartPolicy
    process: _Process | None = None
    due_s: float | None = 0.0

    @property
    def serves(self) -> bool:
        return self.process is not None and bool(self.process.report)

    def take(self, process: _Process) -> None:
        self.process, self.due_s = process, None
        self.policy.began()


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
        self._seats = [_Seat(RestartPolicy(_MAX_STARTS_IN_VAIN, self.max_pause_s)) for _ in range(num_processes)]
        self._processes: list[_Process] = []
        """In seats, in ``_next``, or replaced."""
        self._next: list[_Process] = []
        self._has_served = self._has_failed = self._wants_reload = False
        self._manifests = manifest_folder(options.state)
        self._shards: dict[str, str] = {}
        """The keys of the manifests that a daemon has, by data set, for the one that takes its place."""
        self._ended = Totals()
        """Of processes that have ended."""
        self._ended.add("restarts", "", self.what, 0)
        self._lock = threading.Lock()
        """A process is in ``_processes``, or in ``_ended``."""
        self._stopping = ""
        self._kill_at_s = 0.0
        self._ticked_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._settings = self._next_settings = self._read_settings()
        """For processes at seats, and for those in ``_next``."""

    def run(self) -> bool:
        """Serve until a signal has ended all processes. Returns False if the server gave up by itself."""
        wake, woken = socket.socketpair()
        for sock in (wake, woken):
            sock.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, partial(self._signalled, woken))
        _logger.info("loaderd %s imports %s", VERSION, ", ".join(self._options.targets))
        try:
            while self._processes or not self._stopping:
                due = [seat.due_s for seat in self._seats if seat.due_s is not None]
                due_s = self._kill_at_s if self._stopping else min(due, default=None)
                wait_s = _TICK_S if due_s is None else min(max(0.0, due_s - time.monotonic()), _TICK_S)
                for key, _ in self._selector.select(wait_s):
                    key.data()
                for process in [each for each in self._processes if has_ended(each.process)]:
                    self._lose(process)
                self._tick()
        finally:
            for process in self._processes:
                process.close()
            self._socket.close()
            signal.set_wakeup_fd(-1)
        _logger.info("the server has ended")
        return not self._has_failed

    # ---------------------------------------------------------------------------------- kinds of servers

    def _read_settings(self) -> dict[str, Any]:
        """What processes get with Serve: as files are now, until the next reload. Raises LoaderdError."""
        settings = {name: value for name, value in vars(self._options).items() if not isinstance(value, Address)}
        return {**settings, "manifests": self._manifests}

    @property
    @abstractmethod
    def _address(self) -> str:
        """For ``loaderd.connect``."""

    def _say_how_to_connect(self) -> None:
        name = self._options.targets[0].partition(":")[2]
        call = f'loaderd.connect("{self._address}", dataset="{name}", batch_size={TYPICAL_BATCH_SIZE})'
        note = f"  # with the token in {TOKEN_VARIABLE}" if self._settings.get("tokens") else ""
        _logger.info("connect with %s%s", call, note)

    # ----------------------------------------------------------------------------------------- signals

    def _signalled(self, woken: socket.socket) -> None:
        for number in woken.recv(1 << 10):
            if number == signal.SIGHUP:
                self._reload()
            elif number == signal.SIGCHLD:
                continue
            elif self._stopping:
                _logger.warning("%s again: processes that still run are killed", signal.Signals(number).name)
                self._kill_at_s = 0.0
            else:
                why = f"the server ends ({signal.Signals(number).name})"
                _logger.info("%s; processes that still run in %g s are killed", why, self._options.grace)
                self._stop(why)

    def _stop(self, why: str) -> None:
        """Tell all processes to end; those that have not after ``grace`` seconds are killed."""
        self._stopping = why
        self._kill_at_s = time.monotonic() + self._options.grace
        self._socket.close()  # a consumer that connects now is refused, and may try again
        systemd.notify("STOPPING=1")
        for process in self._processes:
            process.end(Stop(why))

    def _give_up(self, error: LoaderdError) -> None:
        self._has_failed = True
        _logger.critical("the server gives up: %s", error)
        self._stop(f"the server gives up: {error.message}")

    def _reload(self) -> None:
        """Start the next processes, which import the modules again."""
        if self._stopping:
            return
        for process in self._next:  # they may have read old files, and they may hang
            kill_group(process.process)
        # When those have ended, or the first one is ready:
        self._wants_reload = bool(self._next or (not self._is_serving and any(seat.process for seat in self._seats)))
        if self._wants_reload:
            return
        _logger.info("reload: another %s is started%s", self.what, " in each place" if len(self._seats) > 1 else "")
        try:
            self._next_settings = self._read_settings()
            for _ in self._seats:
                self._next.append(self._start(self._next_settings, is_reload=True))
        except (LoaderdError, OSError) as error:  # a file may be gone that was just checked
            self._reload_failed(error)
        else:
            systemd.notify("RELOADING=1")  # READY=1 comes when they serve, or have ended

    def _reload_failed(self, error: Exception) -> None:
        for process in self._next:
            kill_group(process.process)
        self._next = []
        _logger.error("reload failed, the server goes on as it was: %s", error)
        systemd.notify("READY=1")

    # --------------------------------------------------------------------------------------- processes

    @property
    def _is_serving(self) -> bool:
        return any(seat.serves for seat in self._seats)

    def _start(self, settings: dict[str, Any], is_reload: bool = False) -> _Process:
        """Start a process. Raises DaemonError."""
        places = {each.place for each in self._processes}
        process = _Process(self.what, self.module, next(place for place in count() if place not in places))
        process.takes_over = self._has_served
        now = {"current": {} if is_reload else self._shards, "others_serve": self._is_serving, "place": process.place}
        process.send(Serve({**settings, **now, "fds": list(self._fds)}), tuple(self._fds.values()))
        self._processes.append(process)
        self._selector.register(process.channel, selectors.EVENT_READ, partial(self._hear, process))
        return process

    def _hear(self, process: _Process) -> None:
        is_first = not process.report
        try:
            process.receive()
        except ChannelClosed:  # the process is ending: it is lost when it has
            self._selector.unregister(process.channel)
            return
        if not process.report or self._stopping:
            return
        if process in self._next:
            if not self._wants_reload and all(each.report for each in self._next):  # else they have been killed
                self._promote()
        elif is_first and process.takes_over:
            _logger.info("%s serves now", process)
        if any(seat.process is process for seat in self._seats):
            if not self._has_served:
                self._has_served = True
                self._say_how_to_connect()
            datasets = process.report.get("datasets", ())
            self._shards |= {each["name"]: each["manifest"] for each in datasets if each["manifest"]}
            if is_first:
                systemd.notify("READY=1")
        if self._wants_reload:
            self._reload()

    def _promote(self) -> None:
        """The next processes are ready: have them replace the current ones."""
        processes, self._next = self._next, []
        self._settings, self._shards = self._next_settings, {}
        before = [seat.process for seat in self._seats if seat.process is not None]
        for seat, process in zip(self._seats, processes, strict=True):
            seat.take(process)
        new, old = (", ".join(map(str, these)) for these in (processes, before))
        _logger.info("reloaded: %s serves now, in place of %s", new, old or "none")
        for process in before:
            process.is_replaced = True
            process.end(Drain())

    def _lose(self, process: _Process) -> None:
        """A process has ended: clean up after it, and replace it if it is still needed."""
        if process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        how = process.close()
        with self._lock:
            self._processes.remove(process)
            self._ended.add_wire(process.report.get("totals", ()))
        if self._stopping:
            return
        error = process.error or DaemonError(f"{process} {how}")
        if process in self._next:
            self._next.remove(process)
            if not self._wants_reload:
                self._reload_failed(error)
            elif not self._next:
                self._reload()
        elif process.is_replaced:
            _logger.info("%s, which was replaced, %s", process, how)
        for seat in [each for each in self._seats if each.process is process]:
            seat.process = None
            if process.error is not None and not self._has_served:
                self._give_up(process.error)  # the next one would fail in the same way
            else:
                self._restart_later(seat, error, has_served=bool(process.report))

    def _restart_later(self, seat: _Seat, error: LoaderdError, has_served: bool = False) -> None:
        """Start another process after a pause; or give up, if too many in a row never served, and no other does."""
        if has_served:
            seat.policy.achieved()
        elif seat.policy.ended_in_vain() and not self._is_serving:
            self._give_up(error)
            return
        self._ended.add("restarts", "", self.what, 1)
        pause_s = seat.policy.pause_s()
        seat.due_s = time.monotonic() + pause_s
        _logger.error("%s; another %s starts in %.1f s", error.message, self.what, pause_s)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._stopping:
            if now_s >= self._kill_at_s:
                self._kill_at_s = now_s + _TICK_S
                for process in self._processes:
                    kill_group(process.process)
            return
        for seat in self._seats:
            if seat.due_s is not None and seat.due_s <= now_s and not self._stopping:
                try:
                    seat.take(self._start(self._settings))
                except DaemonError as error:
                    self._restart_later(seat, error)
        passed_s = now_s - self._ticked_s
        if passed_s < _TICK_S:
            return
        self._ticked_s = now_s
        for process in self._processes:
            process.ask(_TICK_S)  # no more, even if this process itself was stopped
            if not process.report and process.silent_s > process.patience_s:
                _logger.warning("%s has been starting for %.0f s", process, process.silent_s)
                process.patience_s *= 2
            if process.report and process.silent_s > self._options.watchdog:
                _logger.error("%s has said nothing for %.0f s and is killed", process, process.silent_s)
                kill_group(process.process)
        if not self._why_not_live():
            systemd.keep_alive()

    def _why_not_live(self) -> str:
        """ "" while the server can recover by itself: a restart from outside would not help."""
        limit_s = 2 * self._options.watchdog
        is_stuck = any(each.report and each.silent_s > limit_s for each in list(self._processes))
        return "a process hangs and cannot be killed" if is_stuck else ""


class UnixSupervisor(Supervisor):
    """Keeps a daemon at a Unix socket. Raises ServerError or OptionError if it cannot listen as the options say.

    Health pages have a thread, which only looks.
    """

    what, module, max_pause_s = "daemon", "loaderd.daemon.server_daemon", 5.0
    _options: UnixOptions
    _socket: UnixSocket

    def __init__(self, options: UnixOptions) -> None:
        self._socket = UnixSocket(options.unix)
        self._fds = {"listen": self._socket.fileno()}
        try:
            super().__init__(options, num_processes=1)
            if options.health is not None:
                self._serve_health(options.health)
        except BaseException:
            self._socket.close()
            raise

    @property
    def _address(self) -> str:
        return f"unix://{self._socket.path}"

    # ------------------------------------------------------------------------------------------ health

    def _serve_health(self, address: Address) -> None:
        import asyncio

        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        from loaderd.serve.guarded_http import GuardedHttp, serve_pages
        from loaderd.serve.metrics import page_of, samples
        from loaderd.serve.replies import HealthPages, Reply, health_reply

        def metrics() -> Reply:
            with self._lock:
                reports = [each.report for each in self._processes if each.report]
                totals = self._ended.copy()
            for report in reports:
                totals.add_wire(report["totals"])
            return Reply(200, CONTENT_TYPE_LATEST, (page_of(samples(not self._why_not_ready(), reports, totals)),))

        pages = HealthPages(
            {
                "/livez": lambda: health_reply(self._why_not_live()),
                "/readyz": lambda: health_reply(self._why_not_ready()),
                "/metrics": metrics,
            }
        )
        sock = address.bound("--health")
        GuardedHttp.max_connections = _MAX_HEALTH_CONNECTIONS

        async def serve() -> None:
            await serve_pages(pages, sock)
            await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(serve()), name="health", daemon=True).start()
        _say_where_health_is(address, sock)

    def _why_not_ready(self) -> str:
        """Why consumers cannot be served now; "": they can. A data set that failed matters only if all have."""
        daemon = self._seats[0].process
        if self._stopping or daemon is None or not daemon.report:
            return self._stopping or "the daemon is starting"
        if daemon.silent_s > _ANSWERS_WITHIN_S:
            return f"the daemon has said nothing for {daemon.silent_s:.0f} s"
        states = {each["name"]: each["state"] for each in daemon.report["datasets"]}
        others = {name: state for name, state in states.items() if not state.startswith("failed")} or states
        return "; ".join(f"{name}: {state}" for name, state in others.items() if state != "ready")


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
        for needed in ("uvicorn", "uvloop", "httptools", "prometheus_client"):
            if find_spec(needed) is None:
                raise ModuleNotFoundError(name=needed)
        super().__init__(options, options.workers or default_workers())
        self._socket = options.listen.bound("--listen")
        self._health = None if options.health is None else options.health.bound("--health")
        self._shared, self._deaths = SharedValue(), DeathRecords()
        self._fds = {"listen": self._socket.fileno(), "shared": self._shared.fd, "tickets": self._deaths.fd}
        if self._health is not None:
            self._fds["health"] = self._health.fileno()
        self._readers = Readers()
        """Of processes that have ended."""
        self._started_s = self._counted_s = time.time()
        self._publish()

    def _read_settings(self) -> dict[str, Any]:
        options, tokens = self._options, self._options.tokens()
        for warning in check_secrets(options, tokens):
            _logger.warning("%s", warning)
        settings = {**super()._read_settings(), "tokens": tokens, "workers": len(self._seats), "expires_s": None}
        if options.tls_cert is not None:
            settings["expires_s"] = expiry_of(options.tls_cert)
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
        if not (options.tls_cert and self._settings["tokens"]):
            who = "every user of this machine" if options.listen.is_loopback else "anybody who can connect"
            _logger.warning("without TLS and a token, %s can read the data sets", who)

    def _lose(self, process: _Process) -> None:
        was_to_serve = not self._stopping and any(seat.process is process for seat in self._seats)
        is_death = was_to_serve and exit_status(process.process) != STUCK_STATUS
        self._deaths.record_end(process.place, is_death)
        super()._lose(process)
        self._readers.add_wire(process.report.get("readers", ()))
        self._publish()

    def _tick(self) -> None:
        ticked_s = self._ticked_s
        super()._tick()
        if ticked_s != self._ticked_s:  # the reports are answers to the questions of the tick before
            self._publish()
            self._counted_s = time.time()

    def _publish(self) -> None:
        totals, readers = self._ended.copy(), Readers(self._readers.to_wire())
        for process in self._processes:
            totals.add_wire(process.report.get("totals", ()))
            readers.add_wire(process.report.get("readers", ()))
        times = {"started_s": self._started_s, "counted_s": self._counted_s}
        sums = {"totals": totals.to_wire(), "readers": readers.to_wire()}
        self._shared.write({**times, **sums, "deaths": self._deaths.to_wire()})
