"""``loaderd top`` over a real terminal: it shows what runs, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loaderd.cli.top import screen
from loaderd.observe.top_rows import row_of, short
from loaderd.snapshots import Facts, Outage, Snapshot

COMMAND = str(Path(sys.executable).with_name("loaderd"))
Start = Callable[..., "subprocess.Popen[str]"]
_ENTER, _LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str, width: int = 200) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        self._theirs = theirs
        self.before: Any = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={
                **{name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES")},
                "TERM": "xterm",
            },
            start_new_session=True,
        )
        self.shown = b""

    def wait_for(self, what: bytes) -> bytes:
        """Until it is shown; returns what is, from the last time on."""
        deadline_s = time.monotonic() + 60
        since = len(self.shown)
        while what not in self.shown[since:]:
            assert time.monotonic() < deadline_s, self.shown[since:]
            if select.select([self.fd], [], [], 0.2)[0]:
                self.shown += os.read(self.fd, 1 << 16)
        return self.shown[since:]

    def close(self) -> None:
        for fd in (self.fd, self._theirs):
            os.close(fd)

    def ended(self) -> int:
        """The exit status; the terminal must be as it was."""
        status = self.process.wait(60)
        while select.select([self.fd], [], [], 0.2)[0]:
            self.shown += os.read(self.fd, 1 << 16)
        assert termios.tcgetattr(self._theirs) == self.before
        assert self.shown.count(_ENTER) == self.shown.count(_LEAVE), "the screen from before is back"
        assert self.shown.rfind(b"\x1b[?25h") >= self.shown.rfind(b"\x1b[?25l"), "and so is the cursor"
        return status


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened = []

    def open_one(*arguments: str, width: int = 200) -> Terminal:
        opened.append(Terminal(*arguments, width=width))
        return opened[-1]

    yield open_one
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_it_shows_what_runs_again_and_again(start_training: Start, open_terminal: Callable[..., Terminal]):
    training = start_training(0.01)
    terminal = open_terminal("top", str(training.pid))
    terminal.wait_for(b"loaderd top: 1 loaders")
    terminal.wait_for(b"watched_training.py")
    shown = terminal.wait_for(b"the model")
    assert str(training.pid).encode() in shown


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_the_terminal_as_it_was(open_terminal: Callable[..., Terminal], number: signal.Signals):
    terminal = open_terminal("top")
    terminal.wait_for(b"No loader is running")
    terminal.process.send_signal(number)
    assert terminal.ended() == -number


def test_a_signal_ends_the_wait_for_a_server(open_terminal: Callable[..., Terminal]):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        terminal = open_terminal("status", "--watch", f"http://127.0.0.1:{silent.getsockname()[1]}")
        silent.accept()
        began_s = time.monotonic()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == -signal.SIGINT and time.monotonic() - began_s < 4


def test_it_ends_when_its_terminal_is_gone(open_terminal: Callable[..., Terminal]):
    terminal = open_terminal("top")
    terminal.wait_for(b"No loader is running")
    terminal.close()
    assert terminal.process.wait(60) == 2, "standard output cannot be written"


@pytest.mark.slow
def test_without_a_terminal(start_training: Start):
    training = start_training(0.01)
    done = subprocess.run([COMMAND, "top"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and "loaderd top --once" in done.stderr
    done = subprocess.run([COMMAND, "top", "--once", str(training.pid)], capture_output=True, text=True)
    assert done.returncode == 0 and str(training.pid) in done.stdout and "1 loaders" in done.stdout


def test_commands_are_short():
    assert short("/usr/bin/python3 /home/me/train.py --lr 1") == "train.py --lr 1"
    assert (short("/opt/run"), short("python"), short("")) == ("run", "python", "")


STAGES = ("read", "inflate", "frames", "check", "parse", "order", "fill", "slot", "window")
FACTS = Facts((), (), 1, 1, 10, 1, 4, 10, 1, 1, 0, (), False, 1, 1)
SAMPLE = Snapshot(5.0, 1, 10, 0.0, (), 0.0, False, dict.fromkeys(STAGES, 0.0), {})


def test_a_row_has_the_verdict_of_the_diagnosis():
    later = SAMPLE._replace(time_s=8.0, batches=301, stage_s={**SAMPLE.stage_s, "slot": 2.5, "fill": 0.5}, number=3)
    rows = [row_of(1, "", [SAMPLE._replace(number=1), later], FACTS, now_s) for now_s in (8.0, 20.0)]
    assert [(row.verdict, row.workers, row.is_old) for row in rows] == [
        ("the model", "unpack 17%", False),
        ("the model", "unpack 17%", True),
    ]
    outage = Outage(31.0, 8, "s3://b/a: 503")
    silent = SAMPLE._replace(time_s=8.0, wait_s=3.0, outage=outage, number=3)
    row = row_of(1, "", [SAMPLE._replace(number=1), silent], FACTS, 8.0)
    assert (row.verdict, row.workers) == ("storage does not answer", "no answer for 31 s: s3://b/a: 503")
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen([row, rows[1]], 200))
    text = console.export_text()
    assert "storage does not answer" in text and "silent" in text and text.count("████████") == 1


def test_samples_that_a_consumer_has_overwritten():
    assert row_of(1, "", [SAMPLE, SAMPLE], FACTS, 5.0).steps_per_s == 0
