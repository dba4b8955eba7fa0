"""How a program ends: the last lines of a script, and what a shell sees of it."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest


def some_apart(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters for pytest: all of ``names``; those that are not ``quick`` are run by `make torture` alone."""
    all_of_them = list(names)
    assert set(quick) <= set(all_of_them), set(quick) - set(all_of_them)
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in all_of_them]


TRACEBACK = r"Traceback \(most recent call last\):\n(?: .*\n)+"


@dataclass(frozen=True)
class End:
    """Lines to be put behind those that use a data set as ``it``, and what they come to without loaderd."""

    lines: str
    status: int = 0
    stdout: str = ""
    """A regular expression, as is ``stderr``."""
    stderr: str = ""


ENDS = {
    "end of file": End("last_line()"),
    "exception": End("last_line()\nraise ValueError('mine')", 1, stderr=TRACEBACK + "ValueError: mine\n"),
    "sys.exit": End("last_line()\nsys.exit(3)", 3),
    "sys.exit in a thread": End(
        """
def work():
    next(it)
    last_line()
    sys.exit(3)  # ends the thread alone

threading.Thread(target=work).start()
"""
    ),
    "exception in a thread": End(
        """
def work():
    next(it)
    last_line()
    raise ValueError("mine")

threading.Thread(target=work).start()
""",
        stderr=r"Exception in thread .*:\n" + TRACEBACK + "ValueError: mine\n",
    ),
    "os._exit": End("last_line()\nos._exit(4)", 4),
    "os.abort": End("last_line()\nos.abort()", -signal.SIGABRT),
    "another program takes its place": End("last_line()\nos.execv('/bin/sh', ['sh', '-c', 'exit 6'])", 6),
    "SIGTERM": End("last_line()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", -signal.SIGTERM),
    "SIGKILL": End("last_line()\nos.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGTERM in a loop": End(
        """
threading.Timer(0.1, lambda: (last_line(), os.kill(os.getpid(), signal.SIGTERM))).start()
while True:
    next(it)
""",
        -signal.SIGTERM,
    ),
    "SIGINT": End(
        "last_line()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
        -signal.SIGINT,
        stderr=TRACEBACK + "KeyboardInterrupt\n\n?",
    ),
    "SIGINT in a loop": End(
        """
threading.Timer(0.1, lambda: (last_line(), os.kill(os.getpid(), signal.SIGINT))).start()
while True:
    next(it)
""",
        -signal.SIGINT,
        stderr=TRACEBACK + "KeyboardInterrupt\n\n?",
    ),
    "SIGINT, caught": End(
        """
try:
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    while True:
        next(it)
except KeyboardInterrupt:
    next(it)
    last_line()
"""
    ),
    "SIGINT twice": End(
        """
def interrupt():
    for _ in range(2):
        last_line()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

threading.Timer(0.1, interrupt).start()
while True:
    next(it)
""",
        -signal.SIGINT,
        # Python itself prints more where the second one comes after the first has ended the script.
        stderr=r"(?s).*KeyboardInterrupt.*",
    ),
    "handler that exits": End(
        """
def leave(number, frame):
    last_line()
    sys.exit(5)

signal.signal(signal.SIGTERM, leave)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
while True:
    next(it)
""",
        5,
    ),
    "handler that sets a flag": End(
        """
over = False

def leave(number, frame):
    global over
    over = True

signal.signal(signal.SIGTERM, leave)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
while not over:
    next(it)
last_line()
"""
    ),
    "handler that raises": End(
        """
def leave(number, frame):
    last_line()
    raise ValueError("mine")

signal.signal(signal.SIGINT, leave)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
while True:
    next(it)
""",
        1,
        stderr=TRACEBACK + "ValueError: mine\n",
    ),
    "handler that takes a batch and exits": End(
        """
def leave(number, frame):
    next(it)
    last_line()
    sys.exit(5)

signal.signal(signal.SIGTERM, leave)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
time.sleep(60)
""",
        5,
    ),
}
