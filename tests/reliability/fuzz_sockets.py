"""The fuzz test of a server's sockets: malformed messages, while consumers of every kind check their records.

::

    python -m tests.reliability.fuzz_sockets [--unix 100000] [--network 100000] [--warm-up 500] [--seed 0]

A message here is what one connection, or one call, says that it should not. Each must cost its sender the connection,
and nobody else anything: the readers (``readers.py``) lose nothing, no process ends, and afterwards the server has
the descriptors, the threads and the memory that it had before. Prints figures as a line of JSON; the exit status is 1
if anything went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import (
    PROTOCOL,
    AskStatus,
    Failed,
    Hello,
    Message,
    Opened,
    State,
    Subscribe,
    encode,
)
from loaderd.version import VERSION
from tests.reliability import hostile
from tests.reliability.fuzz_network import Caller
from tests.reliability.fuzzed_server import LIMIT_S, TOKEN, Served, Usage, has_grown, least
from tests.reliability.hostile import OPTIONS, STRANGE, WRONG, Maker

_HELLO = encode(Hello(PROTOCOL, VERSION, "train"))
_SUBSCRIBE = encode(Subscribe(OPTIONS, None))

_FLOOD = 200
_EVERY = 5_000
"""After how many messages there is a flood, and a consumer that does not read."""


@dataclass
class Figures:
    """How many messages of which kind were answered how; what went wrong must be empty."""

    messages: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_answer_s: float = 0.0
    processes: dict[str, str] = field(default_factory=dict)
    readers: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


# --------------------------------------------------------------------------------------- the Unix socket


class UnixFuzzer:
    """Says one thing a connection, and sees how it ends."""

    def __init__(self, served: Served, rng: random.Random, figures: Figures) -> None:
        self._served = served
        self._rng = rng
        self._figures = figures

    def run(self, count: int) -> None:
        for number in range(count):
            self._one()
            if number % _EVERY == 0:
                flood(lambda: self._served.connect().socket, self._figures)
                self._never_read()

    def _one(self) -> None:
        rng = self._rng
        kind = rng.random()
        if kind < 0.5:
            self._say(rng.choice(WRONG), b"", must_fail=True)
        elif kind < 0.51:
            self._say(hostile.too_large, rng.choice([b"", _HELLO]), must_fail=True)
        elif kind < 0.52:
            self._say(descriptors, rng.choice([b"", _HELLO]), must_fail=True)
        elif kind < 0.75:
            self._say(rng.choice(STRANGE), rng.choice([b"", _HELLO, _HELLO + _SUBSCRIBE]))
        elif kind < 0.93:
            self._say(hostile.subscribe, _HELLO, until=Opened)
        else:
            self._say(hostile.in_a_stream, _HELLO + _SUBSCRIBE, after=Opened, until=State)

    def _say(
        self,
        maker: Maker,
        before: bytes,
        *,
        must_fail: bool = False,
        after: type[Message] | None = None,
        until: type[Message] | tuple[type[Message], ...] | None = None,
    ) -> None:
        """Send ``before``, wait for ``after``, send what is wrong; see what comes, to the end or one of ``until``."""
        self._figures.messages[maker.__name__] += 1
        channel = self._served.connect()
        answer = "end"
        try:
            channel.socket.sendall(before)
            if after is not None and self._answer(channel, after) != after.__name__:
                raise ChannelClosed("there is no place just now")
            said_s = time.monotonic()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it knows enough before the end
                if maker is descriptors:
                    socket.send_fds(channel.socket, [_HELLO], [0, 1, 2])
                channel.socket.sendall(maker(self._rng))
                if until is None:  # else something right might be waited for
                    channel.socket.shutdown(socket.SHUT_WR)
            answer = self._answer(channel, until)
            self._figures.longest_answer_s = max(self._figures.longest_answer_s, time.monotonic() - said_s)
        except TimeoutError:
            self._figures.wrong.append(f"{maker.__name__}: no answer for {LIMIT_S} s")
        except ChannelClosed:
            answer = "no place"
        finally:
            channel.close()
        self._figures.ended[answer] += 1
        if must_fail and answer != "Failed":
            self._figures.wrong.append(f"{maker.__name__} is answered by {answer}")

    def _answer(self, channel: Channel, until: type[Message] | tuple[type[Message], ...] | None) -> str:
        try:
            while True:
                for message in channel.receive():
                    if isinstance(message, Failed) or (until is not None and isinstance(message, until)):
                        return type(message).__name__
        except ChannelClosed as closed:
            if "timed out" in str(closed):
                raise TimeoutError from None
            return "end"

    def _never_read(self) -> None:
        """Ask and ask, and read no answer, until the server has enough of it."""
        self._figures.messages["asks and does not read"] += 1
        channel = self._served.connect()
        channel.socket.settimeout(LIMIT_S)
        try:
            channel.socket.sendall(encode(Hello(PROTOCOL, VERSION, "")))
            while True:
                channel.socket.sendall(encode(AskStatus()) * 100)
        except TimeoutError:
            self._figures.wrong.append(f"who asks and does not read is still connected after {LIMIT_S} s")
        except OSError:
            self._figures.ended["end"] += 1
        finally:
            channel.close()


class NetworkFuzzer:
    """Makes one call, or one connection, for each message."""

    def __init__(self, served: Served, rng: random.Random, figures: Figures) -> None:
        self._port = served.port
        self._rng = rng
        self._figures = figures

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), LIMIT_S)

    def run(self, count: int) -> None:
        caller = Caller(self._port, TOKEN, self._rng)
        for number in range(count):
            began_s = time.monotonic()
            what, answer = caller.call()
            self._figures.messages[f"network: {what}"] += 1
            self._figures.ended[f"network: {answer}"] += 1
            self._figures.longest_answer_s = max(self._figures.longest_answer_s, time.monotonic() - began_s)
            if answer == "timeout":
                self._figures.wrong.append(f"network: {what}: no answer for {LIMIT_S} s")
            if number % _EVERY == 0:
                flood(self._connect, self._figures)


def descriptors(_: random.Random) -> bytes:
    """Goes with some."""
    return _HELLO


def flood(connect: Callable[[], socket.socket], figures: Figures) -> None:
    """Many connections at once, and nothing said."""
    figures.messages["flood of connections"] += _FLOOD
    for sock in [connect() for _ in range(_FLOOD)]:
        sock.close()


# -------------------------------------------------------------------------------------------- everything


def fuzz(folder: Path, warm_up: int, num_unix: int, num_network: int, seed: int) -> Figures:
    """So many messages to each socket of a server, with readers beside."""
    figures = Figures()
    rng = random.Random(seed)
    began_s = time.perf_counter()
    served = Served(folder)
    command = [
        sys.executable,
        "-m",
        "tests.reliability.readers",
        served.unix,
        f"http://127.0.0.1:{served.port}",
    ]
    environment = {**os.environ, "LOADERD_TOKEN": TOKEN}
    readers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert readers.stdin is not None and readers.stdout is not None
        assert readers.stdout.readline() == "all read\n", "the readers do not begin"
        for fuzzer in (UnixFuzzer, NetworkFuzzer):
            # Its messages are not counted; what goes wrong is.
            fuzzer(served, rng, Figures(wrong=figures.wrong)).run(warm_up)
        before = least(served, 2)
        UnixFuzzer(served, rng, figures).run(num_unix)
        NetworkFuzzer(served, rng, figures).run(num_network)
        compare(before, least(served, 15, before), figures)
        rest, _ = readers.communicate("over\n")
        figures.readers = json.loads(rest)
        figures.wrong += figures.readers.pop("wrong")
    finally:
        readers.kill()
        readers.wait()
        served.close()
    figures.seconds = round(time.perf_counter() - began_s, 1)
    figures.longest_answer_s = round(figures.longest_answer_s, 3)
    return figures


def compare(before: Usage, after: Usage, figures: Figures) -> None:
    """Whether the server is what it was."""
    for pid, (name, fds, threads, mib) in before.items():
        if pid not in after:
            figures.wrong.append(f"{name} {pid} has ended")
            continue
        _, fds_now, threads_now, mib_now = after[pid]
        figures.processes[f"{name} {pid}"] = (
            f"{fds} descriptors, then {fds_now}; {threads} threads, then {threads_now}; "
            f"{mib:.1f} MiB, then {mib_now:.1f}"
        )
        if has_grown(before[pid], after[pid]):
            figures.wrong.append(f"{name} has grown: {figures.processes[f'{name} {pid}']}")
    figures.wrong += [f"{after[pid][0]} {pid} has been started" for pid in after.keys() - before.keys()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unix", type=int, default=100_000)
    parser.add_argument("--network", type=int, default=100_000)
    parser.add_argument(
        "--warm-up", type=int, default=500, help="messages first: a process keeps memory for what it has done once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept, with the server's log in it; without it, a temporary one")
    args = parser.parse_args()
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        figures = fuzz(Path(folder).resolve(), args.warm_up, args.unix, args.network, args.seed)
    print(json.dumps(vars(figures)))
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
