"""A daemon that is a fork (``forked_starts``) finds what a fresh process finds: or tests would run something else."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaderd

_LIMITS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)


def note(path: str) -> Callable[[Any], Any]:
    """What this process is given by the one that has started it."""
    if not Path(path).exists():  # the first one is the daemon, and then workers come
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        facts = {
            "name": status["Name"],
            "parent": os.getppid(),
            "leads its session": os.getsid(0) == os.getpid(),
            "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
            "umask": status["Umask"],
            "threads": status["Threads"],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "module": sys.argv[:2],
            "path": sys.path,
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
            "cpus": sorted(os.sched_getaffinity(0)),
            "standard": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)],
            "descriptors": len(os.listdir("/proc/self/fd")),
            "collects garbage": gc.isenabled(),
        }
        Path(path).write_text(json.dumps(facts))
    return lambda ids: ids


class Noting:
    """A function that notes what the first process finds that unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __call__(self, ids: Any) -> Any:
        return ids

    def __reduce__(self) -> tuple[Any, ...]:
        return note, (self._path,)


def test_a_fork_is_like_a_fresh_process(
    write_numbered: Callable[..., list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shards = write_numbered([50])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADERD_OF_THIS_TEST", "ä\udcff")
    cpus, limits = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CORE)
    os.sched_setaffinity(0, {min(cpus)})
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    found = []
    try:
        for how in ("fork", "fresh"):
            if how == "fresh":
                monkeypatch.setattr("loaderd.protocol.starting.subprocess", subprocess)
            path = tmp_path / how
            schema = loaderd.Schema(
                {"id": loaderd.Int64()},
                {"x": loaderd.Derived(Noting(path), "id", dtype="int64")},
                {"id": loaderd.Array("id")},
            )
            with loaderd.Loader(shards, schema, batch_size=10, workers=1) as loader:
                assert len(list(loader)) == 5
            found.append(json.loads(path.read_text()))
    finally:
        os.sched_setaffinity(0, cpus)
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    fork, fresh = found
    assert fork == fresh
    assert (fork["name"], fork["parent"], fork["signals"][0]) == ("loaderd-daemon", os.getpid(), f"{0:016x}")
