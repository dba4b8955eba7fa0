"""The processes that make answers for a gateway. Each of them serves one thread of the gateway at a time."""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import threading
import time
from collections import Counter
from hashlib import sha256
from subprocess import TimeoutExpired
from typing import Any

from loaderd.errors import DaemonError, WorkerError
from loaderd.gateway.answers import HINT_OF_DEATHS, NotReady
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.messages import Made, Make, Making, Waits
from loaderd.ipc.spawn import start_process
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS
from loaderd.shm.anonymous import SharedMemory

_LIMIT_S = 60.0  # of silence; while storage is asked again, or rows are made, a maker says so, however long it takes
_FEWEST_CALLS, _MOST_CALLS = 4, 32
_LONGEST_WAIT_S = 0.25
_WEIGHT_OF_LAST = 0.2
_END_S = 3.0
_MAX_DEATHS = 3  # at a row, or before the first one
_MOST_DEATHS = _MAX_DEATHS * (MOST_ROW_FAULTS + 1)  # at a ticket: where more rows are to blame, it is the function
_NO_ROW = -1
_SEARCH_S = 10.0
_TURN_S = 0.01
_REMEMBERED_S = 300.0
_MOST_REMEMBERED = 1000

_logger = logging.getLogger("loaderd")


def calls_per_maker(took_s: float) -> int:
    """How many calls a maker may have if each takes ``took_s`` seconds: the last one waits for all the others.

    Each worker of a consumer has several requests on their way. One that is refused comes again after 0.05 s or
    later, and one that waits for a second is sent to another server as well.
    """
    return max(_FEWEST_CALLS, min(_MOST_CALLS, int(_LONGEST_WAIT_S / took_s))) if took_s else _MOST_CALLS


class _Silent(Exception):
    """A maker says nothing: the storage that it reads hangs, or a function of the user's never ends."""


class _Maker:
    """One process. Raises DaemonError if it cannot be started."""

    def __init__(self, settings: dict[str, Any], memory: SharedMemory) -> None:
        self.row = _NO_ROW
        """The row that it makes, where it names them."""
        self.process, sock = start_process("loaderd.gateway.maker")
        self.channel = Channel(sock)
        self._poll = select.poll()
        self._poll.register(self.channel, select.POLLIN)
        with contextlib.suppress(ChannelClosed):  # it has ended already, which the first question will show
            self.channel.send(Making(settings), (memory.fd,))

    def ask(self, wanted: Make) -> Made:
        """Its answer. Raises ChannelClosed if the process ends meanwhile, _Silent if it says nothing for 60 s."""
        self.row = _NO_ROW
        self.channel.send(wanted)
        while self._poll.poll(1000 * _LIMIT_S):
            for message in self.channel.receive():
                if isinstance(message, Made):
                    return message
                assert isinstance(message, Waits)
                self.row = message.row
        raise _Silent(f"said nothing for {_LIMIT_S:g} s: its storage hangs, or a derived field never ends")

    def end(self) -> str:
        """Kill the process if it still runs; returns how it ended, in words. It takes a few seconds at most."""
        self.channel.close()
        with contextlib.suppress(Exception):
            self.process.wait(0.1)
        self.process.kill()
        try:
            return how_it_ended(self.process.wait(_END_S))
        except TimeoutExpired:  # it waits in the kernel for storage, and ends when that wait does
            threading.Thread(target=self.process.wait, daemon=True).start()
            return "cannot be ended yet"


class _Deaths:
    """Which tickets makers died of, at which row, and when: memory, say, may be short for a while. For any thread."""

    def __init__(self) -> None:
        self._of: dict[bytes, list[tuple[float, int]]] = {}
        self._lock = threading.Lock()

    def of(self, digest: bytes) -> Counter[int]:
        """How many makers died of a ticket that is to be tried now, by row. Forgets what ended five minutes ago."""
        with self._lock:
            deaths = self._of.get(digest, [])
            if deaths and time.monotonic() - deaths[-1][0] > _REMEMBERED_S:
                del self._of[digest]
                deaths = []
            return Counter(row for _, row in deaths)

    def add(self, digest: bytes, row: int) -> None:
        with self._lock:
            if len(self._of) > _MOST_REMEMBERED:
                self._of.clear()
            self._of[digest] = [*self._of.get(digest, ())[-_MOST_DEATHS + 1 :], (time.monotonic(), row)]


class Makers:
    """``number`` processes that write to ``memory``. For use from any thread."""

    def __init__(self, number: int, settings: dict[str, Any], memory: SharedMemory) -> None:
        self.restarts = 0
        self._settings = settings
        self._memory = memory
        self._idle: queue.LifoQueue[_Maker | None] = queue.LifoQueue()
        self._number = number
        self._lock = threading.Lock()
        self._calls = 0
        self._took_s = 0.0
        self._deaths = _Deaths()
        for _ in range(number):
            self._idle.put(_Maker(settings, memory))

    def make(self, wanted: Make) -> Made:
        """A maker's answer. Raises NotReady, and the error that the maker has met.

        If makers died of it, the last one in the last five minutes, its rows are made one by one, and rows of which
        three died are left out. Raises WorkerError if three died before the first row, or of more than 32 rows.
        """
        digest = sha256(wanted.text).digest()  # to count deaths by: a ticket may be long
        with self._lock:
            if self._calls >= self._number * calls_per_maker(self._took_s):
                raise NotReady("the server is full")
            self._calls += 1
        until_s = time.monotonic() + _SEARCH_S
        try:
            while (made := self._make(self._with_care(wanted, digest), digest)) is None:
                time.sleep(_TURN_S)  # else this thread would have the next maker before those that wait for one
                if time.monotonic() > until_s:
                    raise NotReady("the processes that made the rows have ended; ask again")
        finally:
            with self._lock:
                self._calls -= 1
        if made.why_not:
            raise NotReady(made.why_not)
        if made.error is not None:
            raise made.error
        return made

    def _with_care(self, wanted: Make, digest: bytes) -> Make:
        """The same, after what makers died of. Raises WorkerError."""
        deaths = self._deaths.of(digest)
        killers = sorted(row for row, number in deaths.items() if number >= _MAX_DEATHS)
        if _NO_ROW in killers or deaths.total() >= _MOST_DEATHS:
            text = f"{deaths.total()} processes of the server died while they made these rows"
            raise WorkerError(text, hint=HINT_OF_DEATHS)
        return wanted._replace(one_by_one=bool(deaths), without=tuple(killers))

    def _make(self, wanted: Make, digest: bytes) -> Made | None:
        """None: a maker has died of a row, and it is to be asked again. Raises NotReady."""
        maker = self._idle.get()
        try:
            if maker is None:
                maker = _Maker(self._settings, self._memory)
            began_s = time.monotonic()
            made = maker.ask(wanted)
            with self._lock:
                weight = _WEIGHT_OF_LAST if self._took_s else 1.0
                self._took_s += weight * (time.monotonic() - began_s - self._took_s)
            return made
        except (ChannelClosed, _Silent) as error:
            assert maker is not None
            row, how, maker = maker.row, maker.end(), None
            self.restarts += 1
            _logger.error("a maker %s (%s); another one is started", how, error)
            if isinstance(error, _Silent):  # we have killed it: that says nothing against the records
                raise NotReady(f"the process that made the rows {error}; ask again") from None
            self._deaths.add(digest, row)
            if row != _NO_ROW:  # another server's maker would die of it, too
                return None
            raise NotReady("the process that made the rows has ended; ask again") from None
        except DaemonError as error:
            raise NotReady(error.message) from None
        finally:
            self._idle.put(maker)
