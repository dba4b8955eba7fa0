"""The daemon that a loader starts for itself: its parent is its only consumer, and has one stream.

::

    parent ──Open──►  ListTask …, load cached indexes
                      IndexTask … for the rest                   Preparation
                      plan, make the memories, Attach, CheckTask    Probe
           ◄─DataListed─
           ◄─Opened─
           ──ListData──►  (where data sets grow) ListTask …, IndexTask …, Attach
           ◄─DataListed─
           ──StartPass──► LoadTask …, Granted …                  Stream

An error of the stream ends the daemon.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderd.daemon.indexing.preparation import LocalPreparation, Preparation, Prepare
from loaderd.daemon.main_loop import PARENT, Daemon, run_daemon
from loaderd.daemon.session import Session
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError
from loaderd.formats.shard_index import Indexes
from loaderd.ipc.messages import AskState, Message, Notice, Open, ShardsFound, State, UseServers
from loaderd.plan.passes import Listing
from loaderd.plan.positions import Position
from loaderd.redaction import redacted

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemotePreparation
    from loaderd.remote.source import RemoteStream

_STREAM = 0


class PrivateDaemon(Daemon):
    """See the module's docstring."""

    _asking: RemotePreparation | None = None
    """Of a data set on servers, until these have said what it is."""
    _remote: RemoteStream
    _start: str | None
    _preparation: LocalPreparation | None = None
    """Of shards that are read here, until the consumer has been told which were found."""
    _shards: list[list[str] | None] | None = None
    """As in ShardsFound: of sets that do not grow, later listings leave out others. None: there was none yet."""

    def _from_parent(self, message: Message) -> None:
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, UseServers):
            self._use_servers(tuple(message.addresses))
        elif isinstance(message, AskState):
            self._event_loop.post(PARENT, State(self.describe()))
        else:
            self._sessions[_STREAM].received(PARENT, message)

    def _open(self, message: Open) -> None:
        try:
            wanted = pickle.loads(message.description)
        except (Exception, SystemExit) as error:  # modules of the user's are imported
            raise DaemonError(
                f"the daemon cannot take the schema over: {type(error).__name__}: {error}",
                hint="A derived field's function must be importable, or picklable by value, in another process.",
            ) from None
        self._start = message.start
        self._worker_manager.stall_timeout = wanted.options.stall_timeout
        listing = None if message.start is None else Position.from_json(message.start).listing
        if isinstance(wanted, StreamDescription):
            self._shards = message.shards

            def prepare(listing: Listing | None, known: Indexes | None) -> LocalPreparation:
                dataset, options = wanted.dataset, wanted.options
                return LocalPreparation(dataset, options, self._worker_manager, listing, known, self._shards)

            self._preparation = prepare(listing, None)
            self._begin(wanted, message.description, prepare, self._preparation)
        else:
            self._remote = wanted
            self._asking = self._ask(listing, None if self._start is None else Position.from_json(self._start).of)

    def _ask(self, listing: Listing | None, belongs_to: Mapping[str, Any] | None = None) -> RemotePreparation:
        # Imported only here: few streams have their records elsewhere.
        from loaderd.daemon.indexing.remote_data import RemotePreparation

        return RemotePreparation(lambda: self._remote, self._worker_manager, listing, belongs_to)

    def _begin(
        self,
        description: StreamDescription,
        pickled: bytes,
        prepare: Prepare,
        prepared: Preparation,
    ) -> None:
        self._sessions[_STREAM] = session = Session(
            _STREAM,
            replace(description, start=self._start),
            pickled,
            self._worker_manager,
            self._event_loop.post,
            prepared=prepared,
            prepare=prepare,
        )
        session.join(PARENT)

    def _prepare(self) -> None:
        if self._preparation is not None and self._preparation.data is not None:
            self._shards = self._preparation.found()
            self._event_loop.post(PARENT, ShardsFound(self._shards))
            self._preparation = None
        asking = self._asking
        if asking is None:
            return
        asking.advance()
        if asking.progress is not None:
            self._event_loop.post(PARENT, asking.progress)
        if asking.error is not None:
            raise asking.error
        if asking.finished:
            self._asking = None
            self._remote = replace(self._remote, has_begun=True)
            self._event_loop.post(PARENT, asking.welcome)
            description = asking.description
            self._begin(description, pickle.dumps(description), lambda listing, _: self._ask(listing), asking)

    def _use_servers(self, addresses: tuple[str, ...]) -> None:
        self._remote = replace(self._remote, of=replace(self._remote.of, addresses=addresses))
        self._worker_manager.tell_all(UseServers(list(addresses)))

    def _session_failed(self, session: Session, error: LoaderdError) -> None:
        raise error

    def _warn(self, text: str) -> None:
        if (session := self._sessions.get(_STREAM)) is not None:
            session.warn(text)
        else:
            self._event_loop.post(PARENT, Notice(redacted(text), self._worker_manager.pool.restarts))


def main() -> None:
    """Entry point of the process."""
    status = 0
    try:
        run_daemon("loaderd-daemon", PrivateDaemon)
    except SystemExit as end:  # the fork server is dead, and so are the workers
        status = end.code if isinstance(end.code, int) else 1
    # All is given back. The interpreter's own end would take 50 ms, and a loader that is closed would wait for it.
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # a user's module may have printed
    os._exit(status)
