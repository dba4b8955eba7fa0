"""The daemons of tests, which are forks (``ready_daemons``), have what those of a fresh interpreter have."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.ipc import spawn
from tests.helpers.own_processes import newest_daemon
from tests.helpers.ready_daemons import ReadyDaemons

_NAMES = ("NAME", "PATH", "LOADERD_KERNELS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")


def _surroundings(pid: int) -> dict[str, Any]:
    """What a process is in, without numbers that are another each time."""
    links = {path.name: re.sub(r"\d+", "N", os.readlink(path)) for path in Path(f"/proc/{pid}/fd").iterdir()}
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "descriptors": sorted(links.values()),
        "standard streams": [links[number] for number in "012"],
        "parent": int(status["PPid"]) == os.getpid(),
        "leads a session": os.getsid(pid) == pid,
        **{name: status[name] for name in ("Name", "Umask", "Threads", "SigIgn", "SigCgt", "SigBlk", "Seccomp")},
        "cpus": os.sched_getaffinity(pid),
        "folder": os.readlink(f"/proc/{pid}/cwd"),
    }


def _seen(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In each row the same: what a worker's function finds."""
    import sys

    text = repr((sys.argv, sys.path, sys.flags, os.getcwd(), [os.environ.get(name) for name in _NAMES]))
    return np.array([text.encode()] * len(numbers))


def test_a_daemon_has_what_a_fresh_one_has(
    write_numbered: Callable[[Sequence[int]], list[Path]],
    numbered_schema: loaderd.Schema,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ready_daemons: ReadyDaemons,
):
    shards = write_numbered([10])
    fields = {"id": loaderd.Array("id"), "seen": loaderd.Derived(_seen, "id", (), "S20000")}
    schema = loaderd.Schema(numbered_schema.features, fields)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAME", "value\nof two lines")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    found = []
    for module in (ready_daemons.subprocess(), subprocess):
        monkeypatch.setattr(spawn, "subprocess", module)
        with loaderd.Loader(shards, schema, batch_size=10, workers=1) as loader:
            seen = bytes(next(iter(loader))["seen"][0])
            found.append((seen, _surroundings(newest_daemon())))
    assert found[0] == found[1]
    assert b"value\\nof two lines" in found[0][0]
