"""Chooses which of several servers to ask: one that is likely to answer soon, and another one if that fails.

::

    server   good ──fails, is too slow, is full──► away, for 0.1 s, 0.2 s, … ──► tried again ──► good
               └──refuses (token, certificate, other data)──► refused, with the reason, for 5 s

The server is drawn at random. Its weight is the inverse of the time that it would need for the requests that are on
their way to it and for one more, judged by how long its last answers took. So a slow server gets fewer requests, a
new one gets its share at once, and a server that was slow once is tried again. After each attempt that fails,
the next one is given more time: a slow answer is better than none. If the request itself is wrong, no other server is
asked.

What is wrong with the files or the processes of one server (ShardError, WorkerError, Lacking) is the answer only if
the others say so, too. A server that lacked what another one had is asked after the others for the next 5 s.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from loaderd.errors import HOW_TO_GO_ON, LoaderdError, ServerError, ShardError, StorageError, WorkerError
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.source import Settings
from loaderd.storage.outage_tracker import OutageTracker

_FIRST_AWAY_S, _MOST_AWAY_S = 0.1, 5.0
_REFUSED_S = 5.0
_LACKS_S = 5.0
_ENOUGH = 8  # of a thousand servers: a record that kills makers would kill some on each of them
_ATTEMPTS_S = (1.0, 5.0, 10.0, 20.0, 40.0)
_ONE_IN_TIME = 4
_WEIGHT_OF_LAST = 0.2
MOST_DRAWN = 8
"""If there are more servers, so many are chosen at random, and one of these is drawn by its weight."""
MOST_CONNECTED = 32
"""The most servers that are called: each takes a connection, on both sides."""

_Answer = TypeVar("_Answer")


@dataclass(eq=False)
class _Way:
    """The way to a server; the connection is made when it is first used. Times in seconds."""

    address: str
    calls: Calls | None = None
    on_the_way: int = 0
    answer_s: float = 0.0
    """How long its last answers took, averaged; 0: it has given none yet."""
    away_s: float = _FIRST_AWAY_S
    until_s: float = 0.0
    refusal: LoaderdError | None = None
    lacks_until_s: float = 0.0


class Lacking(Exception):
    """Raised by a call: its ``answer`` lacks what another server may have."""

    def __init__(self, answer: Any) -> None:
        super().__init__("it cannot read some of its shards")
        self.answer = answer


Failures = dict[str, Lacking | LoaderdError]
"""What is wrong with servers, by their addresses, in one call."""


def draw(ways: Sequence[tuple[int, float]], rng: random.Random | ModuleType) -> int:
    """The index of the server to ask; ``ways``: (requests on their way, seconds that an answer takes) of each.

    0 s: it has given no answer yet, and counts as the quickest of them.
    """
    usual_s = min((answer_s for _, answer_s in ways if answer_s), default=1.0)
    weights = [1 / ((1 + on_the_way) * (answer_s or usual_s)) for on_the_way, answer_s in ways]
    found: int = rng.choices(range(len(ways)), weights)[0]
    return found


class Servers:
    """For use from any thread. ``addresses``: of servers with the same data, maybe none. ``say`` tells the user."""

    def __init__(self, addresses: tuple[str, ...], settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._lock = threading.Lock()
        self._ways: list[_Way] = []
        self._spare: list[_Way] = []
        self._answered_s = 0.0
        self.outages = OutageTracker()
        self.use(addresses)

    def use(self, addresses: tuple[str, ...]) -> None:
        """Ask these servers from now on; answers of others that were asked before are still taken."""
        with self._lock:
            self._ways = [way for way in self._ways if way.address in addresses]
            known = {way.address for way in self._ways}
            self._spare = [_Way(address) for address in addresses if address not in known]
            random.shuffle(self._spare)
            while self._spare and len(self._ways) < MOST_CONNECTED:
                self._ways.append(self._spare.pop())

    def ask(self, call: Callable[[Calls, float], _Answer], limit_s: float) -> _Answer:
        """What ``call(calls, timeout_s)`` returns for the first server that answers.

        Raises ServerError if none answers for ``limit_s`` seconds, neither this call nor another, a server's reason
        if all refuse or fail, and at once the error of a request that is wrong itself. If all are Lacking, the last
        one's answer is returned.
        """
        began_s = time.monotonic()
        self.outages.begin()
        failures = 0
        last = "there is no address of one"
        said: Failures = {}
        while True:
            is_over = time.monotonic() - max(began_s, self._answered_s) > limit_s
            if is_over and failures:
                break
            way = self._choose(said, all_of_them=is_over)
            if way is None:
                if is_over:
                    break
                time.sleep(self._until_next_s(said))
                continue
            attempt_s = _ATTEMPTS_S[min(failures + (len(self._ways) == 1), len(_ATTEMPTS_S) - 1)]
            try:
                return self._try(way, call, attempt_s, said)
            except OutOfReach as error:
                failures += 1
                last = str(error)
                self.outages.failed(last)
            end = self._end(said)
            if isinstance(end, Lacking):
                return end.answer  # type: ignore[no-any-return]  # which is of the call
            if end is not None:
                raise end
        raise ServerError(
            f"no server has answered for {limit_s:g} s; the last attempt: {last}",
            hint="Are they running? `loaderd serve mypackage.module:dataset --listen HOST:PORT` starts one. "
            + HOW_TO_GO_ON,
        )

    def _choose(self, said: Failures, all_of_them: bool) -> _Way | None:
        """Draw one of those that are not set aside, or of all, but for those in ``said``; None: there is none."""
        now_s = time.monotonic()
        with self._lock:
            # Drawing one of a thousand takes 90 µs, which is 44 ns for each of 2,048 records; one of eight, 2 µs.
            for ways in (random.sample(self._ways, min(MOST_DRAWN, len(self._ways))), self._ways):
                there = [way for way in ways if (all_of_them or way.until_s <= now_s) and way.address not in said]
                if there:
                    break
            else:
                return None
            there = [way for way in there if way.lacks_until_s <= now_s] or there
            way = there[draw([(way.on_the_way, way.answer_s) for way in there], random)]
            way.on_the_way += 1
            return way

    def _try(self, way: _Way, call: Callable[[Calls, float], _Answer], attempt_s: float, said: Failures) -> _Answer:
        """The answer of this server. Raises OutOfReach where another one is to be asked."""
        began_s = time.monotonic()
        try:
            calls = way.calls = way.calls or Calls(way.address, self._settings)
            found = call(calls, attempt_s)
        except OutOfReach as error:
            why = self._why(way, error)
            self._set_aside(way, why, time.monotonic() - began_s)
            raise OutOfReach(str(why)) from None
        except ServerError as error:
            self._set_aside(way, error, 0.0)
            raise OutOfReach(str(error)) from None
        except (Lacking, ShardError, WorkerError) as error:
            said[way.address] = error
            raise OutOfReach(f"the server at {way.address}: {error}") from None
        finally:
            with self._lock:
                way.on_the_way -= 1
        took_s = time.monotonic() - began_s
        with self._lock:
            self._answered_s = time.monotonic()
            self.outages.answered()
            weight = _WEIGHT_OF_LAST if way.answer_s else 1.0
            way.answer_s += weight * (took_s - way.answer_s)
            is_back, way.away_s, way.refusal = way.away_s > _MOST_AWAY_S / 2, _FIRST_AWAY_S, None
        if is_back:
            self._say(f"the server at {way.address} answers again")
        self._ask_later(said)
        return found

    def _why(self, way: _Way, error: OutOfReach) -> LoaderdError | str:
        """Why the server did not answer. If it cannot be reached, a probe finds out why: gRPC does not say it."""
        calls = way.calls or Calls(way.address, self._settings)
        try:
            return (error.unconnected and calls.why_not()) or str(error)
        except LoaderdError as refusal:
            return refusal

    def _set_aside(self, way: _Way, why: LoaderdError | str, lost_s: float) -> None:
        """Do not ask this server for a while.

        If there are others: for two to four times ``lost_s``, the seconds of the failed attempt, or longer.
        """
        now_s = time.monotonic()
        with self._lock:
            is_only = len(self._ways) == 1
            is_first = way.away_s == _FIRST_AWAY_S
            if isinstance(why, LoaderdError):
                way.refusal, way.until_s = why, now_s + _REFUSED_S
                self._replace(way)
            else:
                way.refusal = None
                way.calls = None  # the connection may be dead without a sign: make another one
                away_s = way.away_s if is_only else max(way.away_s, _ONE_IN_TIME * lost_s)
                way.until_s = now_s + away_s * random.uniform(0.5, 1)  # so that many consumers do not come at once
                way.away_s = min(2 * way.away_s, _MOST_AWAY_S)
                self._replace(way)
        if is_first and not (is_only and isinstance(why, LoaderdError)):  # that refusal is raised
            self._say(f"{why}; {'it is asked again' if is_only else 'others are asked, and it again'}")

    def _replace(self, way: _Way) -> None:
        """Call a spare server instead of this one, if there is one; not one that refuses, if this one does."""
        spare = next((each for each in self._spare if not (way.refusal and each.refusal)), None)
        if spare is not None and way in self._ways:
            self._spare.remove(spare)
            self._ways[self._ways.index(way)] = spare
            self._spare.append(_Way(way.address, until_s=way.until_s, refusal=way.refusal))

    def _ask_later(self, said: Failures) -> None:
        """Ask these servers after the others for a while: another one had what they lack."""
        if not said:
            return
        now_s = time.monotonic()
        with self._lock:
            lacking = [way for way in self._ways if way.address in said]
            new = [way for way in lacking if not way.lacks_until_s]
            for way in lacking:
                way.lacks_until_s = now_s + _LACKS_S
        for way in new:
            self._say(f"the server at {way.address}: {said[way.address]}; others are asked first")

    def _end(self, said: Failures) -> Lacking | LoaderdError | None:
        """What ends a call: that all servers refuse, or what is wrong with all that do not; None: it goes on."""
        with self._lock:
            others = [way for way in self._ways + self._spare if way.address not in said]
        refusals = [way.refusal for way in others if way.refusal is not None]
        if said and (len(refusals) == len(others) or len(said) >= _ENOUGH):
            return _chief_of(said)
        return refusals[0] if refusals and len(refusals) == len(others) else None

    def _until_next_s(self, said: Failures) -> float:
        now_s = time.monotonic()
        with self._lock:
            waits = [way.until_s - now_s for way in self._ways if way.address not in said]
        return max(0.01, min([0.5, *waits]))


def _chief_of(said: Failures) -> Lacking | LoaderdError:
    """What to do if nobody has an answer: ask storage again, as no record is lost then; else take what there is."""
    last_first = list(reversed(said.values()))
    for kind in (StorageError, Lacking):
        for each in last_first:
            if isinstance(each, kind):
                return each
    return last_first[0]
