"""Cuts the files of ``programs/`` into programs, runs them, and compares what two runs of one did.

A file is a preamble (imports; and ``# through:``, from where its programs get their batches: ``loaderd``, which is
``make_dataset`` with a daemon of its own, or a server, by one of the ways to share), and cells::

    # %% name: where it is from
    # through: loaderd, mirrored         (optional: from where it gets its batches, if not as the preamble says)
    # apart: it takes long               (optional, of all if in the preamble: only `make torture` runs it; and why)
    # alone: it is global                (optional, likewise: it must not share its process with others; and why)
    # fails: 1                           (optional: the exit status, where it isn't 0)
    # says: OptionError: structure must  (instead of a twin: it is refused, and this is what is said of it)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.programs import Program as Running
from tests.reliability.processes import MARK, name_of, stacks_of, wait_for_none

HERE = Path(__file__).parent
LIMIT_S = 120.0  # of a run of seconds, on a machine that is busy with other tests
_MORE_S = 10.0  # for each program that runs in the same process
_LEFT_S = 30.0  # for the processes of a program to end after it, on such a machine
_CELL = re.compile(r"^# %% (\w+): (.+)$")
_REMARK = re.compile(r"^# (through|apart|alone|fails|says): (.+)$")


@dataclass(frozen=True)
class Program:
    """A cell of a file: a small program."""

    file: str
    name: str
    source: str  # with the preamble, on the lines where the file has it
    through: tuple[str, ...] = ("loaderd",)
    apart: str = ""
    alone: str = ""
    fails: int = 0
    says: str = ""

    @property
    def code(self) -> str:
        """The cell alone."""
        return self.source[self.source.index("# %%") :]

    @property
    def is_sociable(self) -> bool:
        """Whether it may run in one process with others: the end of that is not what it is about."""
        return not (self.alone or self.fails or self.says)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    status: int
    hung: bool
    left: list[str]  # processes that did not end after it
    stdout: str
    stderr: str
    reported: list[Any]

    def __str__(self) -> str:
        return f"exit status {self.status}, stdout:\n{self.stdout}\nstderr:\n{self.stderr}"


def programs_of(file: str) -> list[Program]:
    """The programs of ``programs/<file>.py``."""
    lines = (HERE / "programs" / f"{file}.py").read_text().splitlines()
    begins = [i for i, line in enumerate(lines) if _CELL.match(line)]
    found = []
    preamble = _remarks(lines[: begins[0]])
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        kept = [line if i < begins[0] or begin <= i < end else "" for i, line in enumerate(lines)]
        remarks = {"through": "loaderd", **preamble, **_remarks(lines[begin:end])}
        through = tuple(remarks["through"].split(", "))
        name = _CELL.match(lines[begin])[1]  # type: ignore[index]
        fails, says = int(remarks.get("fails", 0)), remarks.get("says", "")
        source, apart, alone = "\n".join(kept) + "\n", remarks.get("apart", ""), remarks.get("alone", "")
        found.append(Program(file, name, source, through, apart, alone, fails, says))
    assert len({program.name for program in found}) == len(found), f"two programs of {file} have the same name"
    return found


def _remarks(lines: list[str]) -> dict[str, str]:
    return dict(match.groups() for line in lines if (match := _REMARK.match(line)))  # type: ignore[misc]


def files() -> list[str]:
    """The names of the files in ``programs/``."""
    return sorted(path.stem for path in (HERE / "programs").glob("*.py"))


def cases() -> list[Any]:
    """Parameters for pytest: each program, and each way that it gets its batches.

    Those that get them from a server are run with ``loaderd`` too, apart (slow): a daemon for each takes its second.
    """
    return [
        pytest.param(program, source, id=f"{file}.{program.name}-{source}", marks=[pytest.mark.slow] * is_slow)
        for file in files()
        for program in programs_of(file)
        for source in dict.fromkeys(("loaderd", *program.through))
        for is_slow in [bool(program.apart) or source not in program.through or _is_shown_by_another(program, source)]
    ]


# The other programs of in_place.py run quickly in one way to share a data set, and apart (slow) in all.
_IN_EVERY_WAY = ("slice_times_two", "chain", "accumulate")


def _is_shown_by_another(program: Program, source: str) -> bool:
    return program.file == "in_place" and program.name not in _IN_EVERY_WAY and source != program.through[0]


class Programs:
    """Runs programs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "PYTHONHASHSEED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            **environment,
        }
        self._twins: dict[Program, Outcome] = {}
        self._together: dict[tuple[tuple[Program, ...], str], dict[Program, Outcome]] = {}

    def run(self, program: Program, source: str, folder: Path) -> Outcome:
        """Run it on batches from ``source``, in a folder of its own in ``folder``; in memory, once for all."""
        if source != "memory":
            return self._run(program, source, folder)
        if program not in self._twins:
            self._twins[program] = self._run(program, source, folder)
        return self._twins[program]

    def run_together(self, programs: tuple[Program, ...], source: str, folder: Path) -> dict[Program, Outcome]:
        """Run them one after another in one process, once for all."""
        key = (programs, source)
        if key not in self._together:
            self._together[key] = self._run_together(programs, folder / source)
        return self._together[key]

    def _run_together(self, programs: tuple[Program, ...], folder: Path) -> dict[Program, Outcome]:
        paths = [_write(program, folder / program.file / program.name) for program in programs]
        environment = self._environment_for(folder.name, folder)
        started = Running([sys.executable, str(HERE / "together.py"), *map(str, paths)], environment, folder)
        whole = _outcome(started, environment, folder, LIMIT_S + len(programs) * _MORE_S)
        return {program: _one_of(whole, path.parent) for program, path in zip(programs, paths, strict=True)}

    def _run(self, program: Program, source: str, folder: Path) -> Outcome:
        if source == "memory":
            program = replace(program, source=program.source + _AT_ONCE)
        path = _write(program, folder / source)
        environment = self._environment_for(source, path.parent)
        return _outcome(Running([sys.executable, str(path)], environment, path.parent), environment, path.parent)

    def _environment_for(self, source: str, folder: Path) -> dict[str, str]:
        own = {"USAGE_SOURCE": source, "USAGE_REPORT": str(folder / "report"), MARK: uuid.uuid4().hex}
        return {**self.environment, **own}


# How a program ends with its batches in memory says nothing of loaderd, and costs more than the program.
_AT_ONCE = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"


def _write(program: Program, folder: Path) -> Path:
    """``program`` as a file in an empty folder."""
    folder.mkdir(parents=True)
    path = folder / "program.py"
    path.write_text(program.source)
    return path


def _outcome(started: Running, environment: dict[str, str], folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """What the run in ``folder`` did."""
    stacks: list[str] = []
    ended = started.wait(limit_s, lambda pid: stacks.append(stacks_of(pid)))
    left = wait_for_none(environment[MARK], started.pid, ended.time_s + _LEFT_S)
    named = [f"{pid} ({name_of(pid)})" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stdout, stderr = (_without_times(said.replace(str(folder), "")) for said in (ended.stdout, ended.stderr))
    return Outcome(ended.status, ended.hung, named, stdout, "".join([stderr, *stacks]), _reported(folder))


def _reported(folder: Path) -> list[Any]:
    reported = []
    if (folder / "report").exists():
        with (folder / "report").open("rb") as file:
            while file.peek(1):
                reported.append(pickle.load(file))
    return reported


def _one_of(whole: Outcome, folder: Path) -> Outcome:
    """What the program in ``folder`` did, of those that ran in one process: which must have ended well itself."""
    stdout, stderr = (_text(folder / name).replace(str(folder), "") for name in ("stdout", "stderr"))
    status = int(_text(folder / "status") or -1)
    if whole.status or whole.hung or status == -1:
        return replace(whole, status=whole.status or -1, stderr=f"in one process with others: {whole}\n{stderr}")
    said = {"stdout": _without_times(stdout), "stderr": whole.stderr + _without_times(stderr)}
    return replace(whole, status=status, reported=_reported(folder), **said)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


_VARYING = [
    (re.compile(r"^.*Memory patch applied.*\n", re.M), ""),  # of every from_generator
    # Of an iterator that is dropped while TensorFlow tunes it: by timing, whatever it iterates over.
    (re.compile(r"^.*Optimization loop failed: CANCELLED.*\n", re.M), ""),
    # Of a strategy's iterator that is dropped while it copies ahead: by timing, whatever it iterates over.
    (re.compile(r"^.*(GetNextFromShard|Function was cancelled before|node RemoteCall).*\n", re.M), ""),
    (re.compile(r"^.*(CANCELLED: RecvAsync|remotecall_target).*\n", re.M), ""),
    (re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ", re.M), ""),
    (re.compile(r"^([IWEF])0000 00:00:[\d.]+ +\d+ ", re.M), r"\1 "),
    (re.compile(r"\b\d+(\.\d+)?(s|ms|us)(/(step|epoch))?\b"), "T"),
    (re.compile(r"\b\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\b"), "DATE"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"(Iterator|Node|handle|input)[^ ]*_\d+"), r"\1_N"),
]


def _without_times(text: str) -> str:
    for pattern, to in _VARYING:
        text = pattern.sub(to, text)
    return text


def check(program: Program, run: Outcome, twin: Outcome) -> None:
    """Raise AssertionError unless ``run`` did what its twin did, with the same batches in memory."""
    assert not twin.hung and twin.status == program.fails, f"the program itself is wrong: {twin}"
    assert twin.reported or program.fails, "the program reports nothing"
    assert not run.hung, f"it does not end: {run}"
    assert run.status == twin.status, f"{run}"
    assert not run.left, f"left behind: {run.left}"
    new = [line for line in run.stderr.splitlines() if line not in set(twin.stderr.splitlines())]
    if not program.fails:
        assert not new, "stderr has what the twin has not:\n" + "\n".join(new)
        assert run.stdout == twin.stdout, f"stdout: {run.stdout}\n\nwith the batches in memory: {twin.stdout}"
    assert len(run.reported) == len(twin.reported)
    for i, (got, expected) in enumerate(zip(run.reported, twin.reported, strict=True)):
        assert got == expected, f"value {i}: {_described(got)}\n\nwith the batches in memory: {_described(expected)}"


def check_refusal(program: Program, run: Outcome) -> None:
    """Raise AssertionError unless ``run`` was refused in the words of ``program``."""
    assert not run.hung and run.status == 1 and not run.left, f"it is not refused: {run}"
    assert program.says in run.stderr, f"it does not say {program.says!r}: {run}"


def _described(value: Any) -> Any:
    """Arrays are reported as (dtype, shape, bytes)."""
    if isinstance(value, tuple):
        dtype, shape, data = value
        return data if dtype.startswith(("|S", "object")) else np.frombuffer(data, _numpy(dtype)).reshape(shape)
    if isinstance(value, list):
        return [_described(part) for part in value]
    return {key: _described(part) for key, part in value.items()} if isinstance(value, dict) else value


def _numpy(dtype: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
