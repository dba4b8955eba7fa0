"""What can happen to a loader, and what it delivers then."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loaderd
from loaderd.errors import LoaderdError
from loaderd.plan.passes import Pass
from tests.helpers.own_processes import all_workers_of, children_of

Check = Callable[[loaderd.Batch], list[int]]


def fetch_all(
    loader: loaderd.Loader, check: Check, *, before: Callable[[int], None] = lambda step: None
) -> list[Any]:
    """The numbers of each batch of the first pass, or the error in its place."""
    found: list[Any] = []
    steps = range(len(loader))
    first_pass = Pass(0, 1)
    for step in steps:
        before(step)
        try:
            batch = loader._fetch(first_pass, step)
        except LoaderdError as error:
            found.append(error)
        else:
            assert batch is not None
            found.append(check(batch))
    return found


def crashing_schema(function: Callable[[Any], Any]) -> loaderd.Schema:
    """The numbered records, and a field that ``function`` makes of their numbers."""
    fields = {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")}
    derived = loaderd.Derived(function, "id", (), "int64")
    return loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {**fields, "x": derived})


class Grenade:
    """A function that a process of this name cannot unpickle: there ``act`` is called instead."""

    def __init__(self, name: str, act: Callable[[], Any]) -> None:
        self.name, self.act = name, act

    def __call__(self, numbers: Any) -> Any:
        return numbers

    def __reduce__(self) -> Any:
        act, name = self.act, self.name

        def unpickle() -> Any:
            with open("/proc/self/comm") as file:
                return act() if file.read().strip() == name else abs

        return unpickle, ()


@contextlib.contextmanager
def job_of(script: Path, code: str, first_line: str) -> Iterator[tuple[subprocess.Popen[str], int, list[int]]]:
    """A process that runs ``code``, its daemon and its two workers, when it has printed ``first_line``."""
    script.write_text(code)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == f"{first_line}\n"
            (daemon,) = children_of(job.pid)
            yield job, daemon, all_workers_of(daemon, 2)
        finally:
            job.kill()
