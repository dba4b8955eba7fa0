"""The private daemon of one client: the loop between the client, its stream and the workers.

::

    client ──Open──►  ListTask …, load cached indexes
                      IndexTask … for the rest                   Preparation
                      plan, make the memories, Attach, ProbeTask    Probe
           ◄─Listed─
           ◄─Opened─
           ──List──►  (where data sets grow) ListTask …, IndexTask …, Attach
           ◄─Listed─
           ──Start──► LoadTask …, Granted …                      Stream

One thread; it waits in ``select`` for the client, for a worker, or for the training process to end, and after each
event hands out what can be handed out. Whatever goes wrong for good is sent as Failed, and the daemon ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from loaderd.daemon.asking import Asking
from loaderd.daemon.fork_server import ForkServer
from loaderd.daemon.preparation import Preparation
from loaderd.daemon.session import AnyPreparation, Indexes, Session
from loaderd.daemon.waits import describe
from loaderd.daemon.wires import Wires
from loaderd.daemon.worker_pool import WorkerPool
from loaderd.daemon.workforce import Workforce
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError, to_wire
from loaderd.machine import remedy
from loaderd.plan.passes import Listing
from loaderd.plan.positions import listing_in
from loaderd.protocol.channel import Channel
from loaderd.protocol.messages import Ask, Failed, Message, Open, State, Warned, Welcome
from loaderd.protocol.process import enter_process
from loaderd.protocol.worker_messages import UseServers
from loaderd.remote.source import RemoteStream
from loaderd.version import VERSION
from loaderd.workers.worker import main as work

_CLIENT = -1
_STREAM = 0
_MAX_TICK_S = 1.0
_LAST_WORDS_S = 5.0


class Service:
    """Serves one client until it goes, or its process ends."""

    def __init__(self, client: Channel, parent: int, pool: WorkerPool) -> None:
        self._pool = pool
        self._wires = Wires()
        self._parent_fd = os.pidfd_open(parent)
        self._wires.add(_CLIENT, client, self._parent_fd)
        self._workforce: Workforce | None = None
        self._asking: Asking | None = None
        self._session: Session | None = None
        self._ticked_s = time.monotonic()

    def run(self) -> None:
        """Until the client or its process is gone."""
        try:
            while True:
                tick_s = _MAX_TICK_S if self._workforce is None else self._workforce.tick_s
                for number, messages in self._wires.wait(tick_s):
                    if number != _CLIENT:
                        assert self._workforce is not None
                        self._workforce.received(number, messages)
                    elif messages is None:
                        return
                    else:
                        for message in messages:
                            self._from_client(message)
                self._go_on(tick_s)
        except LoaderdError as error:
            self._fail(error)
        except Exception as error:
            self._fail(
                DaemonError(
                    f"the daemon failed: {type(error).__name__}: {error}",
                    hint=remedy(error),
                    traceback=traceback.format_exc(),
                )
            )
        finally:
            self._wires.close()
            self._pool.close()
            os.close(self._parent_fd)

    def _fail(self, error: LoaderdError) -> None:
        self._tell(_CLIENT, Failed(to_wire(error)))
        self._wires.finish(_CLIENT, _LAST_WORDS_S)

    def _tell(self, member: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._wires.post(member, message, fds)

    def _warn(self, text: str) -> None:
        self._tell(_CLIENT, Warned(text, self._pool.restarts))

    def describe(self) -> str:
        """Who waits for whom."""
        if self._workforce is None:
            return f"daemon {os.getpid()}: waits to be told what to open"
        return describe(self._workforce, [] if self._session is None else [self._session])

    def _from_client(self, message: Message) -> None:
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, UseServers):
            self._use_servers(tuple(message.addresses))
        elif isinstance(message, Ask):
            self._tell(_CLIENT, State(self.describe()))
        else:
            assert self._session is not None
            self._session.received(_CLIENT, message)

    def _open(self, message: Open) -> None:
        try:
            wanted = pickle.loads(message.description)
        except Exception as error:
            raise DaemonError(
                f"the daemon cannot take the schema over: {type(error).__name__}: {error}",
                hint="A derived field's function must be importable, or picklable by value, in another process.",
            ) from None
        self._start = message.start
        self._workforce = Workforce(self._wires, self._pool, wanted.options.stall_timeout, self._warn)
        if isinstance(wanted, StreamDescription):
            prepare = partial(Preparation, wanted.dataset, wanted.options, self._workforce)
            self._begin(wanted, prepare, prepare(listing_in(message.start)), message.description)
        else:
            self._remote: RemoteStream = wanted
            self._asking = self._ask(listing_in(message.start))

    def _ask(self, listing: Listing | None, known: Indexes = MappingProxyType({})) -> Asking:
        assert self._workforce is not None
        return Asking(self._remote, self._workforce, listing)

    def _begin(
        self,
        description: StreamDescription,
        prepare: Callable[[Listing | None, Indexes], AnyPreparation],
        prepared: AnyPreparation,
        pickled: bytes | None = None,
    ) -> None:
        assert self._workforce is not None
        description = replace(description, start=self._start)
        self._session = Session(
            _STREAM,
            description,
            self._workforce,
            self._tell,
            prepared=prepared,
            prepare=prepare,
            pickled=pickled,
            reads_page=True,
        )
        self._session.join(_CLIENT)

    def _after_asking(self, asking: Asking) -> None:
        """The servers have said what the data set is."""
        asking.advance()
        if asking.error is not None:
            raise asking.error
        if asking.table is not None:
            self._asking = None
            self._tell(_CLIENT, Welcome(VERSION, asking.table.welcome()))
            self._begin(asking.description, self._ask, asking)

    def _use_servers(self, addresses: tuple[str, ...]) -> None:
        if self._asking is None and self._session is not None and self._workforce is not None:
            self._remote = replace(self._remote, of=replace(self._remote.of, addresses=addresses))
            self._session.use_servers(addresses)
            self._workforce.tell_all(UseServers(list(addresses)))

    def _go_on(self, tick_s: float) -> None:
        """Time passes, but not while this process is stopped: then no more than a tick."""
        if self._workforce is None:
            return
        now_s = time.monotonic()
        if now_s - self._ticked_s >= tick_s:
            self._ticked_s = now_s
            self._workforce.tick()
        if self._asking is not None:
            self._after_asking(self._asking)
        if self._session is not None:
            self._session.advance()
            if self._session.error is not None:
                raise self._session.error
            self._session.hand_over()
        self._workforce.assign()


def main() -> None:
    """Entry point of the daemon process: see ``protocol.process.start_process``."""
    sock, parent = enter_process("loaderd-daemon")
    pool = WorkerPool(ForkServer(work, leave=sock))
    try:
        service = Service(Channel(sock), parent, pool)
    except ProcessLookupError:  # the training process was killed while this one started
        return
    signal.signal(signal.SIGUSR1, lambda *_: print(service.describe(), file=sys.stderr, flush=True))
    service.run()
    # All is given back. The interpreter's own end takes 50 ms, for which whoever closes a loader would wait.
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # a user's module may have printed
    os._exit(0)
