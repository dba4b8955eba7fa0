"""A training as it is seen from outside: its processes, its log, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from competitors import LIBRARIES, Library
from harness.process_tree import process_tree

from loaderd import processes
from trainers import Task

MARK = "LOADERD_RELIABILITY_RUN"  # environment variable that all processes of a run inherit
STARTS_WITHIN_S = 120
SERVERS = 2


def command_line(pid: int) -> str:
    """With the process's name in front; empty where it is gone, or has ended and is not waited for."""
    line = processes.command_of(pid)
    return line and f"{processes.name_of(pid)} {line}"


def marked(mark: str) -> set[int]:
    """All processes that live with this mark in their environment."""
    found, variable = set(), f"{MARK}={mark}".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if variable in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
        except OSError:
            continue
    return found


def has_open(pid: int, folder: Path) -> bool:
    """Whether a process has a file of a folder open."""
    try:
        return any(Path(os.readlink(link)).parent == folder for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def held_in_shm() -> set[str]:
    """Names in /dev/shm that some process has open or mapped."""
    found: set[str] = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{entry}/maps").read_text()))
            for number in os.listdir(f"/proc/{entry}/fd"):
                found.update(re.findall(r"^/dev/shm/(\S+)", os.readlink(f"/proc/{entry}/fd/{number}")))
        except OSError:
            continue
    return found


@dataclass
class Training:
    """A training, and what it leaves: made by :func:`training`, which ends it."""

    library: Library
    task: Task
    process: subprocess.Popen[bytes]
    mark: str
    servers: list[subprocess.Popen[bytes]]
    shm_before: set[str]
    seen: set[int] = field(default_factory=set)

    @property
    def errors(self) -> Path:
        return Path(self.task.folder, "stderr")

    def entries(self) -> list[dict[str, Any]]:
        lines = self.task.log.read_bytes().split(b"\n")[:-1] if self.task.log.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_batches(self, number: int) -> None:
        """Raises RuntimeError where the training ends before, or takes very long."""
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not self.task.log.exists() or self.task.log.read_bytes().count(b'{"keys"') < number:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{self.library.title}: no batch {number}\n{self.errors.read_text()[-3000:]}")
            time.sleep(0.02)
        self.seen |= set(process_tree(self.process.pid))

    def workers(self) -> list[int]:
        """Its worker processes; of a service, the worker servers that live."""
        if self.library.service:
            return [server.pid for server in self.servers[1:] if server.poll() is None]
        children = set(process_tree(self.process.pid)) - {self.process.pid}
        return sorted(
            pid
            for pid in children
            if (line := command_line(pid)) and str(self.library.worker) in line and "resource_tracker" not in line
        )

    def alive(self) -> list[str]:
        """Command lines of its processes that live, without those of a service, which are not of the training."""
        ours = (marked(self.mark) | self.seen) - {server.pid for server in self.servers}
        return [line[:100] for pid in sorted(ours) if (line := command_line(pid))]

    def left(self) -> dict[str, Any]:
        """What of it is there now: processes, names in /dev/shm, names in its temporary folder."""
        shm = set(os.listdir("/dev/shm")) - self.shm_before
        temporary = [str(path.name) for path in Path(self.task.folder, "tmp").rglob("*")]
        return {"processes": self.alive(), "shm": sorted(shm - held_in_shm()) if shm else [], "tmp": temporary}


@contextmanager
def training(name: str, task: Task) -> Iterator[Training]:
    """A training that runs, with its service; all of its processes are killed at the end."""
    library, mark = LIBRARIES[name], uuid.uuid4().hex
    folder = Path(task.folder)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), MARK: mark}
    servers: list[subprocess.Popen[bytes]] = []
    shm_before = set(os.listdir("/dev/shm"))
    try:
        if library.service:
            with (folder / "servers").open("ab") as log:
                start = partial(
                    subprocess.Popen, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder
                )
                module = [sys.executable, "-m", "trainers.tfdata_service_epoch"]
                servers.append(start([*module, "dispatcher", str(folder / "address")]))
                wait_for(folder / "address")
                address = (folder / "address").read_text()
                ready = [folder / f"worker-{number}" for number in range(SERVERS)]
                servers += [start([*module, "worker", address, str(path)]) for path in ready]
                for path in ready:
                    wait_for(path)
                task = Task(**{**asdict(task), "service": address})
        with (folder / "stderr").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainers", name, json.dumps(asdict(task))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # its own process group, as a terminal gives to a foreground job
            )
        yield Training(library, task, process, mark, servers, shm_before)
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):  # of those that end meanwhile
                os.kill(pid, signal.SIGKILL)
        for child in [*servers, *([process] if "process" in locals() else [])]:
            child.kill()
            child.wait()


def wait_for(path: Path) -> None:
    """For a file that a server writes when it serves."""
    until_s = time.monotonic() + STARTS_WITHIN_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise RuntimeError(f"a server has not started: no {path}")
        time.sleep(0.05)
