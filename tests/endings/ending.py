"""Runs a program to its end, and says what is wrong with that.

Wrong is: another exit status or output than the program's own, more time than ``limit_s`` from its last line to its
end, a process that lives a second later, a file in the temporary folder, a pipe that somebody holds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.endings.ends import ENDS, End
from tests.endings.uses import BY_TIMING, DATA_SETS, LOADER_PRINTS, LOADERS, TENSORFLOW_PRINTS
from tests.helpers.programs import Program
from tests.reliability.numbered import write_shards
from tests.reliability.processes import MARK, name_of, stacks_of, wait_for_none

LIMIT_S = 1.0
"""From the last line of a program to its end, where nothing else is to be done."""
BUSY_LIMIT_S = 45.0
"""The same where other tests take the cores: what ends by then did not hang."""
_HANG_LIMIT_S = 60.0  # from its last line; then it is killed
_WHOLE_LIMIT_S = 200.0
PROGRAMS = Path(__file__).parent / "programs"

PRELUDE = """\
import atexit, gc, itertools, os, signal, sys, threading, time, weakref
import given
from given import NUM_BATCHES, batches, data_set, last_line, loader, net, pairs
"""
TENSORFLOW = "import keras, tensorflow as tf\n"


@dataclass(frozen=True)
class Case:
    """A program, and what it must come to. ``tensorflow``: it imports TensorFlow."""

    name: str
    script: str
    end: End
    tensorflow: bool = False
    use: str = ""
    noise: str = "(?!)"
    """What the same program prints to stderr without loaderd, and need not."""
    environment: dict[str, str] = field(default_factory=dict)
    lives_on_s: float = 1.0
    """When nothing of it may be left, after its end."""


def case(use: str, end: str, tensorflow: bool) -> Case:
    """The program that uses its data so, and ends so."""
    lines = (DATA_SETS if tensorflow else LOADERS)[use]
    name = f"{'data set' if tensorflow else 'loader'}, {use}: {end}"
    make = f"make = {'data_set' if tensorflow else 'loader'}\n"
    script = PRELUDE + TENSORFLOW * tensorflow + make + lines + ENDS[end].lines + "\n"
    noise = (TENSORFLOW_PRINTS if tensorflow else LOADER_PRINTS).get(use, "(?!)")
    return Case(name, script, ENDS[end], tensorflow, use, noise)


# A generator is over when an exception has left it.
_CANNOT_BE = {("mirrored in a generator", "SIGINT, caught")}


def every_use_and_end() -> Iterator[Case]:
    """The matrix."""
    for tensorflow, uses in ((False, LOADERS), (True, DATA_SETS)):
        yield from (case(use, end, tensorflow) for use in uses for end in ENDS if (use, end) not in _CANNOT_BE)


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    case: Case
    took_s: float | None
    """From its last line to its end; None if it did not come to its last line."""
    problems: tuple[str, ...]

    def check(self) -> None:
        """Raises AssertionError that names the problems."""
        if self.problems:
            raise AssertionError("\n".join((self.case.name, *self.problems)))


class Runner:
    """Runs programs over shards of their own, in ``folder``."""

    def __init__(self, folder: Path, source: str = "loader") -> None:
        """``source``: as in ``given``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environment = environment_of(folder, source)
        self._numbers = itertools.count(1)

    def run(self, case: Case, limit_s: float = LIMIT_S) -> Result:
        """Run it as a script."""
        return self.run_command(case, "{}", limit_s=limit_s)

    def run_command(self, case: Case, *command: str, stdin: str = "", limit_s: float = LIMIT_S) -> Result:
        """Run it in another way: ``{}`` in ``command`` is its script."""
        script = self.new_folder() / "program.py"
        script.write_text(case.script)
        environment = self.environment_for(script.parent, case)
        words = [sys.executable, *(part.replace("{}", str(script)) for part in command)]
        program = Program(words, environment, script.parent, stdin.encode())
        return self.check(case, program, environment, limit_s)

    def new_folder(self) -> Path:
        """For one program."""
        folder = self.folder / str(next(self._numbers))
        (folder / "temp").mkdir(parents=True)
        return folder

    def environment_for(self, folder: Path, case: Case) -> dict[str, str]:
        """With a mark that is this program's alone."""
        own = {"LAST_LINE": str(folder / "last-line"), "TMPDIR": str(folder / "temp"), MARK: uuid.uuid4().hex}
        return {**self.environment, **own, **case.environment}

    def check(self, case: Case, program: Program, environment: dict[str, str], limit_s: float) -> Result:
        """Wait for its end, and look at what it leaves."""
        stacks: list[str] = []
        last_line = Path(environment["LAST_LINE"])
        until_s = time.monotonic() + _WHOLE_LIMIT_S
        while not program.is_over(0.2) and time.monotonic() < until_s:
            if last_line.exists():
                age_s = time.time() - last_line.stat().st_mtime
                if age_s > _HANG_LIMIT_S:
                    break
        ended = program.wait(0.0, lambda pid: stacks.append(stacks_of(pid)))
        problems = []
        if ended.hung:
            problems.append(f"it hung; it printed:\n{ended.stderr}\n{''.join(stacks)}")
        elif ended.status != case.end.status:
            problems.append(f"status {ended.status}, not {case.end.status}; it printed:\n{ended.stderr}")
        elif not re.fullmatch(case.end.stderr, re.sub(f"{case.noise}|{BY_TIMING}", "", ended.stderr)):
            problems.append(f"it printed, to stderr:\n{ended.stderr}")
        if not ended.hung and not re.fullmatch(case.end.stdout, ended.stdout):
            problems.append(f"it printed:\n{ended.stdout}")
        left = wait_for_none(environment[MARK], program.pid, ended.time_s + max(case.lives_on_s, limit_s))
        problems += [f"it left process {pid} ({name_of(pid)}):\n{stacks_of(pid)}" for pid in left]
        if ended.holds_pipes:
            problems.append("somebody holds its pipes")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left_files = [path for path in Path(environment["TMPDIR"]).rglob("*") if not _is_autograph_s(path)]
        problems += [f"it left {path}" for path in left_files]
        took_s = ended.time_s - float(last_line.read_text()) if last_line.exists() else None
        if took_s is None:
            problems.append(f"it did not come to its last line; it printed:\n{ended.stderr}")
        elif took_s > limit_s and not ended.hung:
            problems.append(f"it took {took_s:.2f} s to end")
        return Result(case, took_s, tuple(problems))


def _is_autograph_s(path: Path) -> bool:
    """TensorFlow's AutoGraph removes the module that it writes, but not what Python compiles of it."""
    return path.name == "__pycache__" or path.name.startswith("__autograph_generated_file")


def environment_of(folder: Path, source: str) -> dict[str, str]:
    """What all programs over the shards of ``folder`` have."""
    shards = folder / "shards"
    if not shards.exists():
        write_shards(shards, [200, 300])
    return {
        "SHARDS": str(shards / "*.tfrecord"),
        "SOURCE": source,
        "LOADERD_CACHE_DIR": str(folder / "index-cache"),
        "PYTHONPATH": ":".join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")])),
    }
