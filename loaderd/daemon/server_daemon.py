"""The daemon that a supervisor starts, and that many consumers share: data sets by name, one pool of workers.

::

    supervisor ──Serve──► import the data sets, begin to index them ──Status──► supervisor
    consumer ──connects──► Hello ──► Welcome ──► Subscribe ──► Session (its own, or its group's) ──► Opened …

The daemon keeps nothing that could be lost: each consumer knows where it stands. An error of a consumer, or of a
stream, ends only the connection of that consumer, or of that stream's consumers; they are told the reason.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import asdict, fields
from functools import partial
from itertools import count
from typing import Any

from loaderd import logs
from loaderd.daemon.catalog import ServedDataset, load_catalog
from loaderd.daemon.indexing.shard_manifest import Manifests
from loaderd.daemon.main_loop import PARENT, Daemon, run_daemon
from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.daemon.server_consumers import Consumer, Limits, asked_once
from loaderd.daemon.session import Session
from loaderd.daemon.totals import Totals
from loaderd.errors import BusyError, LoaderdError, ServerError
from loaderd.ipc.channel import Channel
from loaderd.ipc.messages import (
    AskState,
    AskStatus,
    Bye,
    Drain,
    Failed,
    Hello,
    Message,
    Serve,
    State,
    Status,
    Stop,
    Subscribe,
)
from loaderd.ipc.subscription import Subscription
from loaderd.machine import available_memory, in_mib, remedy
from loaderd.options import default_workers
from loaderd.pickling import pickled_to_send
from loaderd.plan.positions import Position
from loaderd.redaction import shown
from loaderd.version import VERSION

_LISTENER = -2
_FIRST_CONSUMER = 1  # people see these numbers
_STALL_TIMEOUT_S = 120.0
_MARKED_S = 3600.0
_RELOADED = "it was reloaded"

_logger = logging.getLogger("loaderd")


class ServerDaemon(Daemon):
    """Serves until the supervisor sends Stop or is gone, or, after Drain, until the last consumer is gone."""

    def __init__(self, parent: Channel, parent_pid: int, pool: WorkerPool) -> None:
        super().__init__(parent, parent_pid, pool)
        self._worker_manager.stall_timeout = _STALL_TIMEOUT_S
        self._supervisor = parent
        self._limits = Limits()
        self._catalog: dict[str, ServedDataset] = {}
        self._listener: socket.socket | None = None
        self._rests = self._is_full = False
        """No consumer is accepted until the next tick; and none could be since that was said."""
        self._consumers: dict[int, Consumer] = {}
        self._leaving: dict[int, Consumer] = {}
        """Members of groups that were sent away, and may still read the slots that they have: see ``_forget``."""
        self._totals = Totals()
        """Of consumers and streams that have ended."""
        self._sent_away = 0
        self._is_ready = False
        self._consumer_numbers, self._session_numbers = count(_FIRST_CONSUMER), count()
        self._started_s = time.time()
        self._marked_s = time.monotonic()

    def _received(self, number: int, messages: list[Message] | None) -> None:
        consumer = self._consumers.get(number)
        if number == _LISTENER:
            self._accept()
        elif number in self._leaving:
            if messages is None:
                self._disconnect(self._leaving.pop(number))
        elif consumer is None:
            super()._received(number, messages)
        elif messages is None:
            self._part(consumer, consumer.overdue(time.monotonic(), self._limits))
        else:
            consumer.heard_s = time.monotonic()
            for message in asked_once(messages):
                if number in self._consumers:
                    self._from_consumer_safely(consumer, message)

    def _fail(self, error: LoaderdError) -> None:
        self._over = True
        _logger.error("the server fails: %s", error)
        self._say_goodbye(f"it failed: {error.message}")
        super()._fail(error)

    def _warn(self, text: str) -> None:
        _logger.warning(text)

    # -------------------------------------------------------------------------------------- supervisor

    def _parent_is_gone(self) -> None:
        self._say_goodbye("its supervisor is gone")

    def _from_parent(self, message: Message) -> None:
        if isinstance(message, Serve):
            self._serve(message.settings, socket.socket(fileno=self._supervisor.take_fd()))
        elif isinstance(message, AskStatus):
            self._tell_supervisor()
        elif isinstance(message, Drain):
            self._close_listener()
            self._say_bye(_RELOADED, [each for each in self._consumers.values() if each.is_member])
            self._end_if_done()
        elif isinstance(message, Stop):
            self._say_goodbye(message.text)

    def _tell_supervisor(self) -> None:
        self._event_loop.post(PARENT, Status(self.report()))

    def _serve(self, settings: dict[str, Any], listener: socket.socket) -> None:
        logs.configure(settings["log_format"], "daemon")
        self._limits = Limits(**{each.name: settings[each.name] for each in fields(Limits)})
        self._workers = settings["workers"] or default_workers()
        manifests = None if settings["manifests"] is None else Manifests(settings["manifests"])
        self._catalog = load_catalog(
            settings["targets"], self._workers, self._worker_manager, manifests, settings["current"]
        )
        self._worker_manager.start(self._workers)
        self._listener = listener
        listener.setblocking(False)
        self._event_loop.watch(_LISTENER, listener)
        self._tell_supervisor()

    def _close_listener(self) -> None:
        """Take no more consumers. The socket stays open in the supervisor, for the next daemon."""
        if self._listener is not None:
            if not self._rests:
                self._event_loop.unwatch(_LISTENER)
            self._listener.close()
            self._listener = None

    def _say_goodbye(self, text: str) -> None:
        self._close_listener()
        self._worker_manager.pool.end()  # consumers may go on reading what was delivered: nobody may overwrite it
        self._say_bye(text, list(self._consumers.values()))
        self._end_if_done()

    def _say_bye(self, text: str, consumers: list[Consumer]) -> None:
        for consumer in consumers:
            self._event_loop.post(consumer.number, Bye(text))
            self._forget(consumer, has_ended=False)

    def _end_if_done(self) -> None:
        if self._listener is None and not self._consumers and not self._over:
            self._over = True
            self._tell_supervisor()

    # --------------------------------------------------------------------------------------- consumers

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the consumer is gone again, or there are too many open files
            if remedy(error):
                if not self._is_full:
                    _logger.error("cannot accept a consumer: %s. %s", error.strerror, remedy(error))
                self._rests = self._is_full = True
                self._event_loop.unwatch(_LISTENER)  # it stays readable: do not spin
            return
        self._is_full = False
        number = next(self._consumer_numbers)
        try:
            consumer = Consumer.accepted(number, sock)
        except ServerError as error:
            _logger.warning("%s", error)
            self._sent_away += 1
            return
        self._consumers[number] = consumer
        self._event_loop.add(number, consumer.channel, consumer.pidfd)
        if len(self._consumers) > self._limits.max_connections:
            self._part(consumer, BusyError("the server has as many connections as it may have", hint="Try again."))

    def _from_consumer_safely(self, consumer: Consumer, message: Message) -> None:
        try:
            self._from_consumer(consumer, message)
        except LoaderdError as error:
            self._part(consumer, error)
        except Exception as error:  # a message whose fields make no sense together
            text = f"the consumer sent a {type(message).__name__} message that makes no sense"
            self._part(consumer, ServerError(f"{text}: {type(error).__name__}: {error}"))

    def _from_consumer(self, consumer: Consumer, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(consumer, message)
        elif not consumer.greeted:
            raise ServerError("the first message must be Hello")
        elif isinstance(message, AskStatus):
            self._event_loop.post(consumer.number, Status(self.report()))
        elif isinstance(message, Bye):
            consumer.bye = message.text if consumer.bye is None else consumer.bye
        elif isinstance(message, Subscribe):
            self._subscribe(consumer, message)
        elif consumer.session is None:
            raise ServerError(f"{type(message).__name__} came before Subscribe")
        elif isinstance(message, AskState):
            text = f"{consumer.session.waits_for(consumer.number)}\n{self.describe(consumer.session)}"
            self._event_loop.post(consumer.number, State(text))
        else:
            consumer.session.received(consumer.number, message)

    def _greet(self, consumer: Consumer, hello: Hello) -> None:
        consumer.greet(hello)
        if not hello.dataset:
            return
        served = self._catalog.get(hello.dataset)
        if served is None:
            sets = ", ".join(sorted(self._catalog))
            raise ServerError(f"there is no data set {shown(hello.dataset, 100)}; this server has: {sets}")
        self._limits.check_room(sum(bool(other.dataset) for other in self._consumers.values()))
        consumer.dataset = hello.dataset
        self._event_loop.post(consumer.number, served.welcome())

    def _subscribe(self, consumer: Consumer, message: Subscribe) -> None:
        if not consumer.dataset or consumer.session is not None:
            raise ServerError("Subscribe came twice, or without a data set")
        wanted = Subscription.from_wire(message.options)
        self._limits.check(wanted)
        consumer.wanted = wanted
        if wanted.is_group and self._listener is None:  # the rest of the group will be with the next daemon
            self._say_bye(_RELOADED, [consumer])
            return
        group = [other for other in self._consumers.values() if other.is_beside(consumer)]
        wanted.check_beside(other.wanted for other in group if other.wanted is not None)
        session = group[0].session if wanted.is_group and group else None
        if session is None:
            session = self._new_session(self._catalog[consumer.dataset], wanted, message)
        else:
            self._check_room_in(session, wanted)
        consumer.session = session
        session.join(consumer.number)
        _logger.info("%s reads %s, %s", consumer, consumer.dataset, wanted.sharing)

    def _check_room_in(self, session: Session, wanted: Subscription) -> None:
        """Raise an error where a group has no room for another consumer, or for the batches that it may hold."""
        # Each of its consumers has slots for one batch more.
        most = session.description.options.held_batches // wanted.consumers - 1
        if wanted.held_batches > most:
            text = f"held_batches must be at most {most}, the value of the group's first consumer"
            raise ServerError(f"{text}; got {wanted.held_batches}")
        if len(session.present) + len(leaving := self._leaving_of(session)) >= wanted.consumers:
            of_them = f", {len(leaving)} of them sent away and still with batches" if leaving else ""
            raise BusyError(
                f"the group {wanted.group!r} has its {wanted.consumers} consumers{of_them}",
                hint="Give all of them the same, larger `consumers`, or this one another `group`.",
            )

    def _new_session(self, served: ServedDataset, wanted: Subscription, message: Subscribe) -> Session:
        number = next(self._session_numbers)
        description = served.stream(wanted, message.start, self._limits.max_memory)
        prepared, prepare = served.prepare(description)
        of = {} if message.start is None else Position.from_json(message.start).of
        session = Session(
            number,
            description,
            pickled_to_send(description, served.dataset),
            self._worker_manager,
            self._event_loop.post,
            prepared=prepared,
            prepare=prepare,
            earlier=None if prepare is not None else partial(served.earlier, of),
            num_members=wanted.consumers if wanted.is_group else 0,
            dataset=served.name,
            log=partial(_logger.warning, "%s, stream %d: %s", served.name, number),
        )
        self._sessions[number] = session
        return session

    def _part(self, consumer: Consumer, error: LoaderdError | None) -> None:
        """End a connection, for the reason ``error``; None: because the consumer is gone."""
        if error is not None:
            _logger.warning("%s is sent away: %.1000s", consumer, error.message)
            self._sent_away += 1
            self._event_loop.post(consumer.number, Failed(error))
        elif consumer.dataset and consumer.bye is not None:
            _logger.info("%s %s", consumer, f"leaves: {consumer.bye:.100}" if consumer.bye else "has ended")
        elif consumer.dataset:
            _logger.warning("%s is gone without a word: it crashed, or was killed", consumer)
        self._forget(consumer, has_ended=error is None)

    def _forget(self, consumer: Consumer, has_ended: bool) -> None:
        """Remove a consumer, and close its session if it was the last one in it.

        Unless the connection ``has_ended``, the consumer may read its slots until it hears that it is removed. Where
        others of its group would get these slots, they stay lent to it until its connection has ended.
        """
        number, session = consumer.number, consumer.session
        del self._consumers[number]
        if session is not None:
            consumer.add_to(self._totals)
            session.leave(number)
        if session is not None and session.present and session.consumers is not None and not has_ended:
            consumer.channel.ignore()
            self._leaving[number] = consumer
        else:
            self._disconnect(consumer)
        if session is not None and not session.present:
            session.add_to(self._totals)
            session.close()
            del self._sessions[session.number]
            for one in self._leaving_of(session):
                self._disconnect(self._leaving.pop(one.number))
        self._end_if_done()

    def _leaving_of(self, session: Session) -> list[Consumer]:
        return [one for one in self._leaving.values() if one.session is session]

    def _disconnect(self, consumer: Consumer) -> None:
        self._event_loop.remove(consumer.number)
        if consumer.pidfd is not None:
            os.close(consumer.pidfd)
        session = consumer.session
        if session is not None and session.present and session.consumers is not None:  # others need its slots
            session.consumers.give_back_all(consumer.number)

    # ------------------------------------------------------------------------------------- after events

    def _prepare(self) -> None:
        for served in self._catalog.values():
            kept = served.kept
            for text in served.advance():
                _logger.warning("%s: %s", served.name, text)
            if served.kept != kept:
                self._tell_supervisor()  # before a consumer hears of these shards: the next daemon must know them
        if not self._is_ready and self._catalog and all(each.is_ready for each in self._catalog.values()):
            self._is_ready = True
            memory = available_memory()
            text = f"memory: {in_mib(self._memory_bytes)} for consumers now, {self._workers} workers"
            _logger.info("%s; %s are free (%s)", text, in_mib(memory.free_bytes), memory.limit)

    def _session_failed(self, session: Session, error: LoaderdError) -> None:
        if error.traceback:
            _logger.error("the stream of %s fails\n%s", session.present, error.traceback)
        for number in list(session.present):
            self._part(self._consumers[number], error)

    def _tick(self, now_s: float, passed_s: float) -> None:
        super()._tick(now_s, passed_s)
        if self._rests and self._listener is not None:
            self._rests = False
            self._event_loop.watch(_LISTENER, self._listener)
        for consumer in list(self._consumers.values()):
            if error := consumer.overdue(now_s, self._limits):
                self._part(consumer, error)
        if now_s - self._marked_s > _MARKED_S:
            self._marked_s = now_s
            for session in self._sessions.values():
                if session.opened is not None:
                    self._catalog[session.dataset].mark_used(session.opened.listed_message().of)

    # ------------------------------------------------------------------------------------------ report

    @property
    def _memory_bytes(self) -> int:
        return sum(session.memory_bytes for session in self._sessions.values())

    def _all_totals(self) -> Totals:
        """Also of those that are there now."""
        totals = self._totals.copy()
        totals.add("restarts", "", "worker", self._worker_manager.pool.restarts)
        totals.add("refused", "", "unix", self._sent_away)
        for consumer in self._consumers.values():
            consumer.add_to(totals)
        for session in self._sessions.values():
            session.add_to(totals)
        return totals

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows: plain values."""
        now_s = time.monotonic()
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "started_s": self._started_s,
            "workers": len(self._worker_manager.pool.numbers),
            "workers_restarted": self._worker_manager.pool.restarts,
            "memory_bytes": self._memory_bytes,
            "free_bytes": available_memory().free_bytes,
            "draining": self._listener is None,
            "sent_away": self._sent_away,
            "datasets": [served.report() for served in self._catalog.values()],
            "consumers": [each.report(now_s) for each in self._consumers.values() if each.dataset],
            "limits": asdict(self._limits),
            "totals": self._all_totals().to_wire(),
            "text": self.describe(),
        }


def main() -> None:
    """Entry point of the process."""
    run_daemon("loaderd-server", ServerDaemon)
