"""The server's first process: it owns the listening socket, and keeps a daemon and a gateway running.

::

    supervisor ─┬─ daemon    imports the data sets, has the workers, accepts consumers at the socket
                ├─ gateway   with --listen: serves the network
                └─ daemon    after SIGHUP: the next one. When it reports that it is ready, it replaces the first,
                             which sends its groups to it, serves its other consumers until they leave, and ends

The supervisor has one thread, which waits in ``select`` for signals (Python writes their numbers into a socket), its
children, and requests to the health pages. It runs no code of the user's, which could bring it down. The listening
socket outlives the daemons: while no daemon runs, consumers wait in its queue.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loaderd.daemon.catalog import HOW_TRAININGS_END
from loaderd.daemon.indexing.shard_manifest import Manifests
from loaderd.errors import DaemonError, LoaderdError, ServerError
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.messages import Drain, Gateway, Message, Serve, Stop
from loaderd.server import announce, systemd
from loaderd.server.certificates import check_secrets
from loaderd.server.child import Child, Heard
from loaderd.server.health import HealthServer, Page, healthz, livez, readyz
from loaderd.server.output import Output
from loaderd.server.post import Post
from loaderd.server.settings import Address, ServerOptions, default_state_folder
from loaderd.server.unix_socket import UnixSocket
from loaderd.version import VERSION

if TYPE_CHECKING:
    from loaderd.server.metrics import Metrics

_TICK_S = 1.0
_STARTING_TICK_S = 0.25
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_logger = logging.getLogger("loaderd")


def _manifest_folder(options: ServerOptions) -> str | None:
    """The folder of ``daemon.indexing.shard_manifest``; None: the default one cannot be used.

    Raises ServerError if the one that was asked for cannot.
    """
    folder = os.path.join(options.state or default_state_folder(), "manifests")
    try:
        Manifests(folder).close()
    except ServerError as error:
        if options.state is not None:
            raise
        _logger.warning("%s: %s. Choose another one with --state", error.message, HOW_TRAININGS_END)
        return None
    return folder


class Supervisor:
    """Raises ServerError, OptionError or OSError if the server cannot listen as its options say, DaemonError."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        for warning in check_secrets(options):
            _logger.warning("%s", warning)
        self._daemon = Post("daemon", "loaderd.daemon.server_daemon")
        self._gateway = Post("gateway", "loaderd.gateway.flight")
        self._listen = options.listen
        self._posts = [self._daemon] if options.listen is None else [self._daemon, self._gateway]
        self._children: list[Child] = []
        self._next_daemon: Child | None = None
        self._next_options = options
        self._manifests = _manifest_folder(options)
        self._current: dict[str, str] = {}
        """The keys of the manifests that the daemon has, by data set, for the one that takes its place."""
        self._reload_wanted = False
        self._stopping = ""
        self._kill_at_s = 0.0
        self._has_given_up = False
        self._is_known = False
        self._is_announced = False
        self._told: dict[str, str] = {}
        self._ticked_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._socket = UnixSocket(options.unix)
        self._health: HealthServer | None = None
        self._metrics: Metrics | None = None
        if options.health is not None:
            try:
                self._open_health(options.health)
            except BaseException:
                self._close()
                raise

    def _open_health(self, address: Address) -> None:
        if find_spec("prometheus_client") is not None:  # else the page of metrics says what to install
            from loaderd.server.metrics import Metrics

            self._metrics = Metrics()
        pages = {"/livez": self._livez, "/readyz": self._readyz, "/healthz": self._healthz}
        self._health = HealthServer(address, {**pages, "/metrics": self._metrics_page})
        self._selector.register(self._health, selectors.EVENT_READ, self._health.serve)
        _logger.info("health: http://%s/healthz (and /livez, /readyz, /metrics)", self._health.address)

    def run(self) -> bool:
        """Serve until a signal has ended all processes. Returns False if the server gave up by itself."""
        wake, woken = socket.socketpair()
        for sock in (wake, woken):
            sock.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        before_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, partial(self._signalled, woken))
        self._daemon.due_s = 0.0
        _logger.info("loaderd %s imports %s", VERSION, ", ".join(self._options.targets))
        try:
            while self._children or not self._stopping:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._tick()
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            for child in self._children:
                child.reap()
            self._close(wake, woken)
        _logger.info("the server has ended")
        return not self._has_given_up

    def _close(self, *sockets: socket.socket) -> None:
        self._socket.remove()
        if self._health is not None:
            self._health.close()
        for sock in sockets:
            sock.close()
        self._selector.close()

    # ----------------------------------------------------------------------------------------- signals

    def _signalled(self, woken: socket.socket) -> None:
        for number in woken.recv(1 << 10):
            if number == signal.SIGHUP:
                self._reload()
            elif self._stopping:
                _logger.warning("%s again: processes that still run are killed", signal.Signals(number).name)
                self._kill_at_s = 0.0
            else:
                why = f"the server ends ({signal.Signals(number).name})"
                _logger.info("%s; processes that still run in %g s are killed", why, self._options.grace)
                self._stop(why)

    def _stop(self, why: str) -> None:
        """Tell all children to end; those that have not after ``grace`` seconds are killed."""
        self._stopping = why
        self._kill_at_s = time.monotonic() + self._options.grace
        self._socket.remove()  # a consumer that connects now is refused, and may try again
        systemd.notify("STOPPING=1")
        for child in self._children:
            child.tell(Stop(why))

    def _give_up(self, error: LoaderdError) -> None:
        self._has_given_up = True
        _logger.critical("the server gives up: %s", error)
        self._stop(f"the server gives up: {error.message}")

    def _reload(self) -> None:
        """Start the next daemon, which imports the modules again; when it is ready, the gateway is replaced, too."""
        current = self._daemon.child
        if self._stopping:
            return
        if self._next_daemon is not None:  # it may have read old files, and it may hang
            self._next_daemon.process.kill()
        if self._next_daemon is not None or (current is not None and current.report is None):
            self._reload_wanted = True  # when the starting one has ended, or is ready
            return
        self._reload_wanted = False
        try:
            options = self._options.renewed()
            for warning in check_secrets(options):
                _logger.warning("%s", warning)
            _logger.info("reload: another daemon is started")
            self._next_daemon = self._child_of(self._daemon, {})
        except LoaderdError as error:
            _logger.error("reload failed, the server goes on as it was: %s", error)
            systemd.notify("READY=1")
        else:
            self._next_options = options
            systemd.notify("RELOADING=1")  # READY=1 comes when this daemon serves, or has ended

    # ---------------------------------------------------------------------------------------- children

    def _first_message(self, post: Post, current: Mapping[str, str]) -> tuple[Message, tuple[int, ...]]:
        if post is self._daemon:
            return Serve(self._options.for_daemon(self._manifests, current)), (self._socket.socket.fileno(),)
        assert self._listen is not None
        return Gateway(self._options.for_gateway(self._listen)), ()

    def _child_of(self, post: Post, current: Mapping[str, str]) -> Child:
        heard, captures = self._count_of(post), self._options.log_format == "json"
        child = Child(post.name, post.module, *self._first_message(post, current), heard, captures)
        self._children.append(child)
        if child.output is not None:
            self._selector.register(child.output, selectors.EVENT_READ, partial(self._pass_on, child.output))
        self._selector.register(child.channel, selectors.EVENT_READ, partial(self._hear, child))
        self._selector.register(child.pid_fd, selectors.EVENT_READ, partial(self._lose, child))
        return child

    def _count_of(self, post: Post) -> Heard:
        """The function that counts what is in the reports of a post's processes."""
        if self._metrics is None:
            return lambda before, report: None
        return self._metrics.heard_daemon if post is self._daemon else self._metrics.heard_gateway

    def _pass_on(self, output: Output) -> None:
        if output.is_open and not output.take():  # its process may have been lost in the same round
            self._selector.unregister(output)

    def _fill(self, post: Post) -> None:
        post.due_s = None
        post.policy.began()
        try:
            post.child = self._child_of(post, self._current)
        except DaemonError as error:
            self._missed(post, error)

    def _hear(self, child: Child) -> None:
        if child not in self._children:  # it was lost in the same round
            return
        before = child.report
        try:
            if not child.hear():
                return
        except ChannelClosed:  # the process is ending: _lose is called when it has
            self._selector.unregister(child.channel)
            return
        assert child.report is not None
        if child is self._next_daemon:
            self._promote(child)
        post = self._post_of(child)
        if not self._stopping and post is not None:
            post.has_ever_served = True
            kept = {each["name"]: each["manifest"] for each in child.report.get("datasets", ())}
            self._current |= {name: key for name, key in kept.items() if key}
            self._announce(child, is_first=before is None)
        if self._reload_wanted:
            self._reload()

    def _post_of(self, child: Child) -> Post | None:
        return next((post for post in self._posts if post.child is child), None)

    def _promote(self, child: Child) -> None:
        """The next daemon is ready: have it replace the current one."""
        before = self._daemon.child
        self._daemon.child, self._daemon.due_s, self._next_daemon = child, None, None
        self._current = {}
        self._options = self._next_options
        self._daemon.policy.began()
        _logger.info("reloaded: %s serves now", child)
        if before is not None:
            _logger.info("%s ends when its last consumer has left", before)
            before.tell(Drain())
        if self._gateway.child is not None:
            self._gateway.is_renewed = True
            self._is_announced = False
            self._gateway.child.tell(Stop("another gateway replaces it"))

    def _announce(self, child: Child, is_first: bool) -> None:
        """Log what is new in the last report of the daemon or the gateway."""
        assert child.report is not None
        lines: list[announce.Line] = []
        if is_first and any(post.child is child and post.restarts for post in self._posts):
            lines.append((logging.INFO, f"{child} serves now"))
        if child is not self._daemon.child:
            if is_first and self._listen is not None and not self._is_announced:
                # The actual port, if the option was 0: the next gateway listens at the same one.
                self._is_announced = True
                self._listen = Address.parse(child.report["address"])
                lines += announce.network(self._listen, self._options)
        else:
            if not self._is_known:
                lines += announce.unix(self._socket.path, self._options)
                if self._gateway in self._posts:
                    self._gateway.due_s = 0.0
            self._is_known = True
            lines += announce.datasets(child.report, self._told)
        for level, line in lines:
            _logger.log(level, "%s", line)
        if is_first and all(post.child is not None and post.child.report is not None for post in self._posts):
            systemd.notify("READY=1")

    def _lose(self, child: Child) -> None:
        """A process has ended: clean up after it, and replace it if it is still needed."""
        registered = self._selector.get_map()
        fds = [child.pid_fd, child.channel.fileno(), *([] if child.output is None else [child.output.fileno()])]
        for fd in fds:
            if fd in registered:
                self._selector.unregister(fd)
        how = child.reap()
        self._children.remove(child)
        if self._stopping:
            return
        error = child.error or DaemonError(f"{child} {how}")
        post = self._post_of(child)
        if child is self._next_daemon:
            self._next_daemon = None
            if self._reload_wanted:
                self._reload()
                return
            _logger.error("reload failed, the server goes on as it was: %s", error)
            systemd.notify("READY=1")
        elif post is None:
            _logger.info("%s, which was to end with its last consumer, %s", child, how)
        elif post.is_renewed:
            post.is_renewed, post.child, post.due_s = False, None, 0.0
        elif child.error is not None and child.report is None and not (post.restarts or post.has_ever_served):
            self._give_up(child.error)  # the next one would fail in the same way
        else:
            self._missed(post, error, has_served=child.report is not None)

    def _missed(self, post: Post, error: LoaderdError, has_served: bool = False) -> None:
        """Start the next process after a delay; or give up, if too many in a row never served."""
        delay_s = post.missed(has_served)
        if delay_s is None:
            self._give_up(error)
        else:
            _logger.error("%s; another %s starts in %.1f s", error.message, post.name, delay_s)

    # -------------------------------------------------------------------------------------------- time

    def _timeout_s(self) -> float:
        now_s = time.monotonic()
        if self._stopping:
            return max(0.0, min(self._kill_at_s - now_s, _TICK_S))
        due = [post.due_s - now_s for post in self._posts if post.due_s is not None]
        return max(0.0, min([*due, _STARTING_TICK_S if self._why_not() else _TICK_S]))

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._health is not None:
            self._health.drop_slow()
        if self._stopping:
            if now_s >= self._kill_at_s:
                for child in self._children:
                    child.process.kill()
                self._kill_at_s = now_s + _TICK_S
            return
        for post in self._posts:
            if post.due_s is not None and post.due_s <= now_s:
                self._fill(post)
        passed_s = now_s - self._ticked_s
        if passed_s < _STARTING_TICK_S:
            return
        self._ticked_s = now_s
        for child in self._children:
            child.ask(min(passed_s, _TICK_S))  # no more: this process itself may have been stopped
            if child.report is None and child.silent_s > child.patience_s:
                _logger.warning("%s has been starting for %.0f s", child, child.silent_s)
                child.patience_s *= 2
            if child.silent_s > self._options.watchdog and child.report is not None:
                _logger.error("%s has said nothing for %.0f s and is killed", child, child.silent_s)
                child.process.kill()
        if not self._is_stuck():
            systemd.keep_alive()

    # ------------------------------------------------------------------------------------------ health

    def _is_stuck(self) -> bool:
        """Whether a process does not answer, and killing it has not ended it."""
        limit_s = 2 * self._options.watchdog
        return any(child.report is not None and child.silent_s > limit_s for child in self._children)

    def _not_ready(self) -> dict[str, str]:
        """The processes and data sets that cannot serve consumers now, and why."""
        if self._stopping:
            return {"server": self._stopping}
        posts = {post.name: post.why_not() for post in self._posts}
        sets = {each["name"]: each["state"] for each in self._report()["datasets"] if each["state"] != "ready"}
        return {**{name: why for name, why in posts.items() if why}, **sets}

    def _why_not(self) -> str:
        """Why not all consumers can be served now; "" if they can."""
        posts = [post.name for post in self._posts]
        return "; ".join(
            why if name in posts or name == "server" else f"{name}: {why}" for name, why in self._not_ready().items()
        )

    def _report(self) -> dict[str, Any]:
        """The daemon's last report; before the first one, a report of no consumers and no data sets."""
        child = self._daemon.child
        return (child.report if child is not None else None) or {"pid": os.getpid(), "datasets": [], "consumers": []}

    def _livez(self) -> Page:
        return livez(self._is_stuck())

    def _readyz(self) -> Page:
        return readyz(self._not_ready(), self._report())

    def _healthz(self) -> Page:
        return healthz(self._why_not(), self._report())

    def _metrics_page(self) -> Page:
        if self._metrics is None:
            return Page(501, "text/plain", b"/metrics needs prometheus-client: pip install 'loaderd[metrics]'\n")
        daemons = [child for child in self._children if child.name == self._daemon.name]
        reports = [child.report for child in daemons if child.report is not None]
        restarts = {post.name: post.restarts for post in self._posts}
        return self._metrics.page(not self._why_not(), reports, restarts)
