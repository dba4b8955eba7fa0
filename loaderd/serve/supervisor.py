"""``loaderd serve --unix``: the server's first process owns the listening socket, and keeps a daemon running.

::

    supervisor ─┬─ daemon    imports the data sets, has the workers, accepts consumers at the socket
                └─ daemon    after SIGHUP: the next one. When it reports that it is ready, it replaces the first,
                             which sends its groups to it, serves its other consumers until they leave, and ends

The supervisor waits in ``select`` for signals (Python writes their numbers into a socket; SIGCHLD is among them) and
for its daemons. It runs no code of the user's, which could bring it down. The listening socket outlives the daemons:
while no daemon runs, consumers wait in its queue. Health pages have a thread, which only looks.
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
from collections.abc import Mapping
from functools import partial
from typing import Any

from loaderd.daemon.totals import Totals
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.messages import AskStatus, Drain, Failed, Message, Serve, Status, Stop
from loaderd.ipc.spawn import has_ended, kill_group, start_process
from loaderd.restarts import RestartPolicy
from loaderd.serve import systemd
from loaderd.serve.options import Address, UnixOptions, manifest_folder
from loaderd.serve.unix_socket import UnixSocket
from loaderd.version import VERSION

_TICK_S = 1.0
_ANSWERS_WITHIN_S = 5.0
_MAX_STARTS_IN_VAIN = 3
_MAX_HEALTH_CONNECTIONS = 32

_logger = logging.getLogger("loaderd")


class _Daemon:
    """A daemon's process. Raises DaemonError if it cannot be started."""

    def __init__(self, serve: Serve, listener: socket.socket) -> None:
        self.process, sock = start_process("loaderd.daemon.server_daemon")
        self.channel = Channel(sock)
        self.report: dict[str, Any] = {}
        """Of its last Status; empty while it starts."""
        self.error: LoaderdError | None = None
        """Why it gave up, if it said so."""
        self.silent_s = 0.0
        """For how many seconds the last question, or the first message, has had no answer."""
        self.patience_s = 30.0
        """After so many silent seconds, the log says that it is still starting."""
        self._is_asked = True  # the first message is answered with a Status, too
        self.send(serve, (listener.fileno(),))

    def __str__(self) -> str:
        return f"daemon {self.process.pid}"

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

    def close(self) -> str:
        """Kill the process if it lives, read its last messages; returns how it ended, in words."""
        kill_group(self.process)
        how = how_it_ended(self.process.wait())
        with contextlib.suppress(ChannelClosed):
            while select.select([self.channel], [], [], 0)[0]:  # not to its end: forks of it may keep it open
                self.receive()
        self.channel.close()
        return how


class Supervisor:
    """Raises ServerError or OptionError if the server cannot listen as its options say."""

    def __init__(self, options: UnixOptions) -> None:
        self._options = options
        self._daemons: list[_Daemon] = []
        self._current: _Daemon | None = None
        self._next: _Daemon | None = None
        self._due_s: float | None = 0.0
        """When to start a daemon (monotonic); None: one runs."""
        self._policy = RestartPolicy(_MAX_STARTS_IN_VAIN)
        self._has_served = self._has_failed = self._wants_reload = False
        self._manifests = manifest_folder(options.state)
        self._shards: dict[str, str] = {}
        """The keys of the manifests that the daemon has, by data set, for the one that takes its place."""
        self._ended = Totals()
        """Of daemons that have ended."""
        self._ended.add("restarts", "", "daemon", 0)
        self._lock = threading.Lock()
        """A daemon is in ``_daemons``, or in ``_ended``."""
        self._stopping = ""
        self._kill_at_s = 0.0
        self._ticked_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._socket = UnixSocket(options.unix)
        try:
            if options.health is not None:
                self._serve_health(options.health)
        except BaseException:
            self._socket.remove()
            raise

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
            while self._daemons or not self._stopping:
                due_s = self._kill_at_s if self._stopping else self._due_s
                wait_s = _TICK_S if due_s is None else min(max(0.0, due_s - time.monotonic()), _TICK_S)
                for key, _ in self._selector.select(wait_s):
                    key.data()
                for daemon in [each for each in self._daemons if has_ended(each.process)]:
                    self._lose(daemon)
                self._tick()
        finally:
            for daemon in self._daemons:
                daemon.close()
            self._socket.remove()
            signal.set_wakeup_fd(-1)
        _logger.info("the server has ended")
        return not self._has_failed

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
        """Tell all daemons to end; those that have not after ``grace`` seconds are killed."""
        self._stopping = why
        self._kill_at_s = time.monotonic() + self._options.grace
        self._socket.remove()  # a consumer that connects now is refused, and may try again
        systemd.notify("STOPPING=1")
        for daemon in self._daemons:
            daemon.send(Stop(why))

    def _give_up(self, error: LoaderdError) -> None:
        self._has_failed = True
        _logger.critical("the server gives up: %s", error)
        self._stop(f"the server gives up: {error.message}")

    def _reload(self) -> None:
        """Start the next daemon, which imports the modules again."""
        if self._stopping:
            return
        if self._next is not None:  # it may have read old files, and it may hang
            kill_group(self._next.process)
        is_starting = self._current is not None and not self._current.report
        self._wants_reload = self._next is not None or is_starting  # when that one has ended, or is ready
        if self._wants_reload:
            return
        try:
            _logger.info("reload: another daemon is started")
            self._next = self._start({})
        except LoaderdError as error:
            _logger.error("reload failed, the server goes on as it was: %s", error)
            systemd.notify("READY=1")
        else:
            systemd.notify("RELOADING=1")  # READY=1 comes when this daemon serves, or has ended

    # ----------------------------------------------------------------------------------------- daemons

    def _start(self, shards: Mapping[str, str]) -> _Daemon:
        """Start a daemon. Raises DaemonError."""
        daemon = _Daemon(Serve(self._options.for_daemon(self._manifests, shards)), self._socket.socket)
        self._daemons.append(daemon)
        self._selector.register(daemon.channel, selectors.EVENT_READ, partial(self._hear, daemon))
        return daemon

    def _hear(self, daemon: _Daemon) -> None:
        is_first = not daemon.report
        try:
            daemon.receive()
        except ChannelClosed:  # the process is ending: it is lost when it has
            self._selector.unregister(daemon.channel)
            return
        if not daemon.report or self._stopping:
            return
        if daemon is self._next:
            self._promote(daemon)
        elif is_first and self._has_served:
            _logger.info("%s serves now", daemon)
        if daemon is self._current:
            self._has_served = True
            self._shards |= {each["name"]: each["manifest"] for each in daemon.report["datasets"] if each["manifest"]}
            if is_first:
                systemd.notify("READY=1")
        if self._wants_reload:
            self._reload()

    def _promote(self, daemon: _Daemon) -> None:
        """The next daemon is ready: have it replace the current one."""
        before, self._current, self._next = self._current, daemon, None
        self._due_s = None
        self._shards = {}
        self._policy.began()
        _logger.info("reloaded: %s serves now", daemon)
        if before is not None:
            _logger.info("%s ends when its last consumer has left", before)
            before.send(Drain())

    def _lose(self, daemon: _Daemon) -> None:
        """A process has ended: clean up after it, and replace it if it is still needed."""
        if daemon.channel in self._selector.get_map():
            self._selector.unregister(daemon.channel)
        how = daemon.close()
        with self._lock:
            self._daemons.remove(daemon)
            self._ended.add_wire(daemon.report.get("totals", ()))
        if self._stopping:
            return
        error = daemon.error or DaemonError(f"{daemon} {how}")
        if daemon is self._next:
            self._next = None
            if self._wants_reload:
                self._reload()
                return
            _logger.error("reload failed, the server goes on as it was: %s", error)
            systemd.notify("READY=1")
        elif daemon is not self._current:
            _logger.info("%s, which was to end with its last consumer, %s", daemon, how)
        elif daemon.error is not None and not self._has_served:
            self._give_up(daemon.error)  # the next one would fail in the same way
        else:
            self._current = None
            self._restart_later(error, has_served=bool(daemon.report))

    def _restart_later(self, error: LoaderdError, has_served: bool = False) -> None:
        """Start the next daemon after a pause; or give up, if too many in a row never served."""
        if has_served:
            self._policy.achieved()
        elif self._policy.ended_in_vain():
            self._give_up(error)
            return
        self._ended.add("restarts", "", "daemon", 1)
        pause_s = self._policy.pause_s()
        self._due_s = time.monotonic() + pause_s
        _logger.error("%s; another daemon starts in %.1f s", error.message, pause_s)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._stopping:
            if now_s >= self._kill_at_s:
                self._kill_at_s = now_s + _TICK_S
                for daemon in self._daemons:
                    kill_group(daemon.process)
            return
        if self._due_s is not None and self._due_s <= now_s:
            self._due_s = None
            self._policy.began()
            try:
                self._current = self._start(self._shards)
            except DaemonError as error:
                self._restart_later(error)
        passed_s = now_s - self._ticked_s
        if passed_s < _TICK_S:
            return
        self._ticked_s = now_s
        for daemon in self._daemons:
            daemon.ask(_TICK_S)  # no more, even if this process itself was stopped
            if not daemon.report and daemon.silent_s > daemon.patience_s:
                _logger.warning("%s has been starting for %.0f s", daemon, daemon.silent_s)
                daemon.patience_s *= 2
            if daemon.report and daemon.silent_s > self._options.watchdog:
                _logger.error("%s has said nothing for %.0f s and is killed", daemon, daemon.silent_s)
                kill_group(daemon.process)
        if not self._why_not_live():
            systemd.keep_alive()

    # ------------------------------------------------------------------------------------------ health

    def _serve_health(self, address: Address) -> None:
        import asyncio

        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        from loaderd.serve.counters import page_of
        from loaderd.serve.guarded_http import GuardedHttp, bound, serve_pages
        from loaderd.serve.metrics import samples
        from loaderd.serve.replies import HealthPages, Reply, health_reply

        def metrics() -> Reply:
            with self._lock:
                reports = [each.report for each in self._daemons if each.report]
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
        sock = bound(address, "--health")
        GuardedHttp.max_connections = _MAX_HEALTH_CONNECTIONS

        async def serve() -> None:
            await serve_pages(pages, sock)
            await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(serve()), name="health", daemon=True).start()
        where = Address(address.host, sock.getsockname()[1])
        _logger.info("health: http://%s/readyz (and /livez, /metrics)", where)

    def _why_not_live(self) -> str:
        """ "" while the server can recover by itself: a restart from outside would not help."""
        limit_s = 2 * self._options.watchdog
        is_stuck = any(each.report and each.silent_s > limit_s for each in list(self._daemons))
        return "a process hangs and cannot be killed" if is_stuck else ""

    def _why_not_ready(self) -> str:
        """Why consumers cannot be served now; "": they can. A data set that failed matters only if all have."""
        daemon = self._current
        if self._stopping or daemon is None or not daemon.report:
            return self._stopping or "the daemon is starting"
        if daemon.silent_s > _ANSWERS_WITHIN_S:
            return f"the daemon has said nothing for {daemon.silent_s:.0f} s"
        states = {each["name"]: each["state"] for each in daemon.report["datasets"]}
        others = {name: state for name, state in states.items() if not state.startswith("failed")} or states
        return "; ".join(f"{name}: {state}" for name, state in others.items() if state != "ready")
