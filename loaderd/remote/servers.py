"""Chooses which of several servers to ask: one that is likely to answer soon, and another one if that fails.

::

    server   good ──fails, is too slow, is full──► away, for 0.1 s, 0.2 s, … ──► tried again ──► good
               └──refuses (token, certificate, other data)──► refused, with the reason, for 5 s

The server is drawn at random. Its weight is the inverse of the time that it would need for the requests that are on
their server to it and for one more, judged by how long its last answers took. So a slow server gets fewer requests, a
new one gets its share at once, and a server that was slow once is tried again. After each attempt that fails,
the next one is given more time: a slow answer is better than none. A request that is wrong itself is refused by all.

What is wrong with the files or the processes of one server (ShardError, WorkerError, Lacking) is the answer only if
the others say so, too. A server that lacked what another one had is asked after the others for the next 5 s. A server
that finds no shards is away for those who have read some: it was started anew before its storage was mounted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from loaderd.errors import (
    HOW_TO_GO_ON,
    LoaderdError,
    NoShardsError,
    ServerError,
    ShardError,
    StorageError,
    WorkerError,
)
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.source import Settings
from loaderd.storage.outage_tracker import OutageTracker

_FIRST_AWAY_S, _MOST_AWAY_S = 0.1, 5.0
_REFUSED_S = _LACKS_S = 5.0
_ENOUGH = 8  # of a thousand servers: a record that kills makers would kill some on each of them
_ATTEMPTS_S = (1.0, 5.0, 10.0, 20.0, 40.0)
_ONE_IN_TIME = 4
_USUAL_TIMES = 4
_WEIGHT_OF_LAST = 0.2

_Answer = TypeVar("_Answer")


@dataclass(eq=False)
class _Server:
    """A server; the connection is made when it is first used. Times in seconds."""

    address: str
    calls: Calls | None = None
    on_the_way: int = 0
    answer_s: float = 0.0
    """How long its last answers took, averaged; 0: it has given none yet."""
    away_s: float = _FIRST_AWAY_S
    until_s: float = 0.0
    """Until when it is not asked."""
    refusal: LoaderdError | None = None
    lacks_until_s: float = 0.0
    """Until when it is asked after the others; 0: it has not lacked what another one had."""


class Lacking(Exception):
    """Raised by a call: its ``answer`` lacks what another server may have."""

    def __init__(self, answer: Any) -> None:
        super().__init__("it cannot read some of its shards")
        self.answer = answer


Failures = dict[str, Lacking | LoaderdError]
"""What is wrong with servers, by their addresses, in one call."""


def draw(servers: Sequence[tuple[int, float]], rng: random.Random | ModuleType) -> int:
    """The index of the server to ask; ``servers``: (requests on their way, seconds that an answer takes) of each.

    0 s: it has given no answer yet, and counts as the quickest of them.
    """
    usual_s = min((answer_s for _, answer_s in servers if answer_s), default=1.0)
    weights = [1 / ((1 + on_the_way) * (answer_s or usual_s)) for on_the_way, answer_s in servers]
    found: int = rng.choices(range(len(servers)), weights)[0]
    return found


class Servers:
    """For use from any thread. ``addresses``: of servers with the same data, maybe none. ``say`` tells the user.

    ``has_begun``: the consumer has had data, so that there are shards.
    """

    def __init__(
        self, addresses: tuple[str, ...], settings: Settings, say: Callable[[str], None], has_begun: bool = False
    ) -> None:
        self._has_begun = has_begun
        self._settings = settings
        self._say = say
        self._lock = threading.Lock()
        self._servers: list[_Server] = []
        self._answered_s = 0.0
        self.outages = OutageTracker()
        self.use(addresses)

    def use(self, addresses: tuple[str, ...]) -> None:
        """Ask these servers from now on; answers of others that were asked before are still taken."""
        with self._lock:
            known = {server.address: server for server in self._servers}
            self._servers = [known.get(address) or _Server(address) for address in addresses]

    def ask(self, call: Callable[[Calls, float], _Answer], limit_s: float) -> _Answer:
        """What ``call(calls, timeout_s)`` returns for the first server that answers.

        Raises ServerError if none answers for ``limit_s`` seconds, neither this call nor another, a server's reason
        if all refuse or fail. If all are Lacking, the last one's answer is returned.
        """
        began_s = time.monotonic()
        self.outages.begin()
        attempts = 0
        last = "there is no address of one"
        failed: Failures = {}
        while True:
            is_over = time.monotonic() - max(began_s, self._answered_s) > limit_s
            server = self._choose(failed, all_of_them=is_over)
            if is_over and (attempts or server is None):
                break
            if server is None:
                time.sleep(self._until_next_s(failed))
                continue
            step_s = _ATTEMPTS_S[min(attempts + (len(self._servers) == 1), len(_ATTEMPTS_S) - 1)]
            try:
                return self._try(server, call, max(step_s, _USUAL_TIMES * server.answer_s), failed)
            except OutOfReach as error:
                attempts += 1
                last = str(error)
                self.outages.failed(last)
            end = self._end(failed)
            if isinstance(end, Lacking):
                return end.answer  # type: ignore[no-any-return]  # which is of the call
            if end is not None:
                raise end
        raise ServerError(
            f"no server has answered for {limit_s:g} s; the last attempt: {last}",
            hint="Are they running? `loaderd serve mypackage.module:dataset --listen HOST:PORT` starts one. "
            + HOW_TO_GO_ON,
        )

    def _choose(self, failed: Failures, all_of_them: bool) -> _Server | None:
        """Draw one of those that are not set aside, or of all, but for those in ``failed``; None: there is none."""
        now_s = time.monotonic()
        with self._lock:
            there = [
                server
                for server in self._servers
                if (all_of_them or server.until_s <= now_s) and server.address not in failed
            ]
            there = [server for server in there if server.lacks_until_s <= now_s] or there
            return there[draw([(each.on_the_way, each.answer_s) for each in there], random)] if there else None

    def _try(
        self, server: _Server, call: Callable[[Calls, float], _Answer], attempt_s: float, failed: Failures
    ) -> _Answer:
        """The answer of this server. Raises OutOfReach where another one is to be asked."""
        began_s = time.monotonic()
        with self._lock:
            server.on_the_way += 1
        try:
            calls = server.calls = server.calls or Calls(server.address, self._settings)
            found = call(calls, attempt_s)
        except OutOfReach as error:
            self._set_aside(server, str(error), time.monotonic() - began_s)
            raise
        except (Lacking, ShardError, WorkerError) as error:
            text = f"the server at {server.address}: {getattr(error, 'message', error)}"
            if self._has_begun and isinstance(error, NoShardsError):
                self._set_aside(server, text, time.monotonic() - began_s)
            else:
                failed[server.address] = error
            raise OutOfReach(text) from None
        except LoaderdError as error:  # of another version, or with another certificate, say
            self._refuse(server, error)
            raise OutOfReach(str(error)) from None
        finally:
            with self._lock:
                server.on_the_way -= 1
        self._note_answer(server, time.monotonic() - began_s, failed)
        return found

    def _note_answer(self, server: _Server, took_s: float, failed: Failures) -> None:
        """``failed``: servers that lack what this one had."""
        with self._lock:
            self._answered_s = now_s = time.monotonic()
            self.outages.answered()
            weight = _WEIGHT_OF_LAST if server.answer_s else 1.0
            server.answer_s += weight * (took_s - server.answer_s)
            is_back, server.away_s, server.refusal = server.away_s > _MOST_AWAY_S / 2, _FIRST_AWAY_S, None
            lacking = [each for each in self._servers if each.address in failed]
            new = [each for each in lacking if not each.lacks_until_s]
            for each in lacking:
                each.lacks_until_s = now_s + _LACKS_S
        if is_back:
            self._say(f"the server at {server.address} answers again")
        for each in new:
            self._say(f"the server at {each.address}: {failed[each.address]}; others are asked first")

    def _refuse(self, server: _Server, why: LoaderdError) -> None:
        with self._lock:
            is_first, server.refusal = server.refusal is None, why
            server.until_s = time.monotonic() + _REFUSED_S
        if is_first and len(self._servers) > 1:  # else it is raised
            self._say(f"the server at {server.address} refuses: {why}; others are asked, and it again")

    def _set_aside(self, server: _Server, why: str, lost_s: float) -> None:
        """Do not ask this server for a while.

        If there are others: for two to four times ``lost_s``, the seconds of the failed attempt, or longer.
        """
        with self._lock:
            is_only = len(self._servers) == 1
            is_first = server.away_s == _FIRST_AWAY_S
            server.refusal = None
            server.calls = None  # the connection may be dead without a sign: make another one
            away_s = server.away_s if is_only else max(server.away_s, _ONE_IN_TIME * lost_s)
            # At random, so that many consumers do not come at once.
            server.until_s = time.monotonic() + away_s * random.uniform(0.5, 1)
            server.away_s = min(2 * server.away_s, _MOST_AWAY_S)
        if is_first:
            self._say(f"{why}; {'it is asked again' if is_only else 'others are asked, and it again'}")

    def _end(self, failed: Failures) -> Lacking | LoaderdError | None:
        """What ends a call: that all servers refuse, or what is wrong with all that do not; None: it goes on."""
        with self._lock:
            others = [server.refusal for server in self._servers if server.address not in failed]
        refusals = [refusal for refusal in others if refusal is not None]
        if failed and (len(refusals) == len(others) or len(failed) >= _ENOUGH):
            return _worst_of(failed)
        return refusals[0] if refusals and len(refusals) == len(others) else None

    def _until_next_s(self, failed: Failures) -> float:
        now_s = time.monotonic()
        with self._lock:
            waits = [server.until_s - now_s for server in self._servers if server.address not in failed]
        return max(0.01, min([0.5, *waits]))


def _worst_of(failed: Failures) -> Lacking | LoaderdError:
    """What to do if nobody has an answer: ask storage again, as no record is lost then; else take what there is."""
    last_first = list(reversed(failed.values()))
    for kind in (StorageError, Lacking):
        for each in last_first:
            if isinstance(each, kind):
                return each
    return last_first[0]
