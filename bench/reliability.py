"""The same accidents with loaderd, tf.data, tf.data service, PyTorch's DataLoader and Grain: what happens.

::

    python bench/reliability.py [--rounds 5] [--libraries loaderd_loader …] [--accidents kill_worker …] [--jobs 2]

Each run is a training in a process of its own (``trainers/``, a module a library, which says how it is configured)
over one epoch of records that carry their number and are known. It is disturbed once, at a batch between 30 % and
60 % of the epoch that the round decides, and looked at from outside:

- **It ends, fails or hangs**: its exit status, the last error in its log, or for ``--limit-seconds`` no batch, no
  error and no end, after which it is killed.
- **Records** that its log has are compared with those that were written, as multisets: lost, repeated, altered; their
  order, with that of runs that nothing disturbed.
- **What is left**: processes that were given the run's environment (or were seen in its tree), entries of /dev/shm
  that no other process holds, entries of its ``TMPDIR``. **Lines** on its standard error since the accident.

The accidents are in ``ACCIDENTS``. Those that look at what is left in /dev/shm run alone, the others ``--jobs`` at
a time. A library that is not installed is left out.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

from questions._common import parser_of, publish
from trainers import RECORD_BYTES, Task, keys_of

from loaderd.bench.process_tree import process_tree
from loaderd.bench.synthetic import shard_records, write_shards

MARK = "LOADERD_RELIABILITY_RUN"  # environment variable that all processes of a run inherit
HEADER_BYTES, FOOTER_BYTES = 12, 4  # of a record in a shard
SAVE_STEPS = 10
LEFT_AFTER_S = (2, 10)  # when what is left is looked at
CTRL_C_S = 5
STARTS_WITHIN_S = 120
SERVERS = 2

Run = dict[str, Any]


@dataclass(frozen=True)
class Library:
    """``worker``: what the command lines of its workers have in them; None: it has threads."""

    title: str
    packages: tuple[str, ...]
    worker: str | None
    service: bool = False


LIBRARIES = {
    "loaderd_loader": Library("loaderd", ("loaderd",), "loaderd.workers.main"),
    "tfdata": Library("tf.data", ("tensorflow",), None),
    "tfdata_service": Library("tf.data service", ("tensorflow",), "trainers.tfdata_service worker", service=True),
    "torch_loader": Library("DataLoader", ("torch", "tfrecord", "torchdata"), "-m trainers torch_loader"),
    "torch_timeout": Library(
        "DataLoader(timeout=5)", ("torch", "tfrecord", "torchdata"), "-m trainers torch_timeout"
    ),
    "grain_loader": Library("Grain", ("grain", "tfrecord"), "multiprocessing.spawn import spawn_main"),
}

# --------------------------------------------------------------------------------------------------- processes


def command_line(pid: int) -> str:
    """Empty where the process is gone, or has ended and is not waited for."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> set[int]:
    """All processes that live with this mark in their environment."""
    found = set()
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(
                b"\0"
            ):
                found.add(int(entry))
        except OSError:
            continue
    return found


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
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), MARK: mark}
    servers: list[subprocess.Popen[bytes]] = []
    shm_before = set(os.listdir("/dev/shm"))
    try:
        if library.service:
            with (folder / "servers").open("ab") as log:
                start = partial(
                    subprocess.Popen, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder
                )
                module = [sys.executable, "-m", "trainers.tfdata_service"]
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


# ---------------------------------------------------------------------------------------------------- accidents


@dataclass(frozen=True)
class World:
    """What all runs share: the shards, and for each the offsets of its records."""

    shards: list[str]
    keys: list[int]
    """Of all records, in the order of the shards."""
    offsets: list[list[int]]
    """Of each shard, where its records begin; and its size in bytes."""
    batch_size: int
    step_s: float
    limit_s: float

    @property
    def num_batches(self) -> int:
        return len(self.keys) // self.batch_size

    def task(self, folder: Path, **options: Any) -> Task:
        return Task(self.shards, str(folder), self.batch_size, self.step_s, **options)


def make_world(folder: Path, num_records: int, num_shards: int, **sizes: Any) -> World:
    paths = write_shards(folder / "shards", num_records, num_shards=num_shards, record_size=RECORD_BYTES)
    keys: list[int] = []
    for shard in range(num_shards):
        for d, s in shard_records(shard, num_records, num_shards, 0, RECORD_BYTES):
            keys += keys_of(d, s)
    offsets = []
    for path in paths:
        data, places = path.read_bytes(), [0]
        while places[-1] < len(data):
            length = int.from_bytes(data[places[-1] : places[-1] + 8], "little")
            places.append(places[-1] + HEADER_BYTES + length + FOOTER_BYTES)
        offsets.append(places)
    return World(list(map(str, paths)), keys, offsets, **sizes)


def delivered(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    return [key for entry in entries for key in entry.get("keys", ())]


def result(run: Training, world: World, gone: Sequence[int] = (), errors_from: int = 0) -> Run:
    """What a training that ended, or did not, has delivered; ``gone``: keys that no reader can deliver.

    ``stderr_lines``: those from byte ``errors_from`` on.
    """
    entries = run.entries()
    keys, planned = delivered(entries), Counter(world.keys) - Counter(gone)
    got, written = Counter(keys), set(world.keys)
    errors = [entry["error"] for entry in entries if "error" in entry]
    return {
        "keys_digest": hash(tuple(keys)),
        "delivered": len(keys),
        "lost": sum((planned - got).values()),
        "repeated": sum(count - 1 for key, count in got.items() if key in planned and count > 1),
        "altered": sum(key not in written for key in keys),
        "errors": [error[:3000] for error in errors[:5]],
        "num_errors": len(errors),
        "reported": "\n".join(entry["reported"] for entry in entries if "reported" in entry)[:2000],
        "epoch_ended": any("end" in entry for entry in entries),
        "stderr_lines": run.errors.read_bytes()[errors_from:].count(b"\n"),
        "stderr_tail": run.errors.read_bytes()[errors_from:].decode(errors="replace")[-1500:],
    }


def outcome(run: Training, world: World, began_s: float) -> Run:
    """Whether its process ends, and how many seconds after ``began_s`` the epoch has ended or failed.

    It hangs when its log has not grown, and its process has not ended, for ``world.limit_s``; before the log has its
    first line, which imports can delay, for ``STARTS_WITHIN_S``.
    """
    size, grown_s = 0, began_s
    while (status := run.process.poll()) is None:
        if time.monotonic() > grown_s + (world.limit_s if size else STARTS_WITHIN_S):
            break
        now = run.task.log.stat().st_size if run.task.log.exists() else 0
        if now != size:
            size, grown_s = now, time.monotonic()
        time.sleep(0.02)
    last = [entry["at_s"] for entry in run.entries() if "at_s" in entry]
    kind = "hangs" if status is None else "ends" if status == 0 else "error"
    return {"outcome": kind, "after_s": (last[-1] if last else time.monotonic()) - began_s, "status": status}


def undisturbed(name: str, world: World, folder: Path, rng: random.Random) -> Run:
    with training(name, world.task(folder)) as run:
        began_s = time.monotonic()
        run.wait_for_batches(1)
        found = outcome(run, world, began_s)
        return {**found, **result(run, world), "left": {"0": run.left()}}


def signal_worker(number: int, name: str, world: World, folder: Path, rng: random.Random) -> Run:
    """``number`` to one worker, in the middle of the epoch."""
    if LIBRARIES[name].worker is None:
        return {"outcome": "no processes"}
    with training(name, world.task(folder)) as run:
        run.wait_for_batches(moment(world, rng))
        written = run.errors.stat().st_size
        workers = run.workers()
        if not workers:
            raise RuntimeError(f"{name}: no worker among {run.alive()}")
        os.kill(rng.choice(workers), number)
        return {**outcome(run, world, time.monotonic()), **result(run, world, errors_from=written)}


def moment(world: World, rng: random.Random) -> int:
    return rng.randint(world.num_batches * 3 // 10, world.num_batches * 6 // 10)


def damage(kind: str, skip: bool, name: str, world: World, folder: Path, rng: random.Random) -> Run:
    """One shard is damaged before the training begins. ``skip``: the library is asked to leave damage out."""
    shards = [str(folder / "shards" / Path(path).name) for path in world.shards]
    shutil.copytree(Path(world.shards[0]).parent, folder / "shards")
    shard = rng.randrange(len(shards))
    record = rng.randrange(len(world.offsets[shard]) * 3 // 10, len(world.offsets[shard]) * 6 // 10)
    offset, end = world.offsets[shard][record : record + 2]
    first = sum(len(offsets) - 1 for offsets in world.offsets[:shard])
    gone = [world.keys[first + record]]
    data = bytearray(Path(shards[shard]).read_bytes())
    if kind == "truncated":
        gone = world.keys[first + record : first + len(world.offsets[shard]) - 1]
        del data[rng.randrange(offset + 1, end) :]
    elif kind == "length":
        data[offset + rng.randrange(8)] ^= 1 << rng.randrange(8)
    else:
        stored = (
            offset
            + HEADER_BYTES
            + data[offset + HEADER_BYTES : end].index(world.keys[first + record].to_bytes(8, "big")[:4])
        )  # where the bytes of d begin
        data[rng.randrange(stored + 4, stored + RECORD_BYTES)] ^= 1 << rng.randrange(8)
    Path(shards[shard]).write_bytes(data)
    task = Task(**{**asdict(world.task(folder, skip=skip)), "shards": shards})
    with training(name, task) as run:
        found = {**outcome(run, world, time.monotonic()), **result(run, world, gone)}
        errors = [entry.get("error", "") + entry.get("reported", "") for entry in run.entries()]
        text = "\n".join([*errors, run.errors.read_text(errors="replace")])
    names = {
        "shard": Path(shards[shard]).name in text,
        "record": bool(re.search(rf"record\D{{0,12}}\b{record}\b", text)),
        "offset": bool(re.search(rf"\b({offset}|{offset + HEADER_BYTES})\b", text)),
    }
    return {**found, "names": [what for what, named in names.items() if named], "place": [shard, record, offset]}


def kill_training(name: str, world: World, folder: Path, rng: random.Random) -> Run:
    with training(name, world.task(folder)) as run:
        run.wait_for_batches(moment(world, rng))
        written = run.errors.stat().st_size
        run.process.kill()
        run.process.wait()
        return {"outcome": "killed", **looked_at(run, world, written)}


def looked_at(run: Training, world: World, written: int) -> Run:
    """What is left after each of ``LEFT_AFTER_S`` seconds."""
    began_s, left = time.monotonic(), {}
    for after_s in LEFT_AFTER_S:
        time.sleep(max(0.0, began_s + after_s - time.monotonic()))
        left[str(after_s)] = run.left()
    return {"left": left, **result(run, world, errors_from=written)}


def interrupt(name: str, world: World, folder: Path, rng: random.Random) -> Run:
    """Ctrl-C: SIGINT to the process group, once."""
    with training(name, world.task(folder)) as run:
        run.wait_for_batches(moment(world, rng))
        written, began_s = run.errors.stat().st_size, time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        try:
            run.process.wait(CTRL_C_S)
            found = {"outcome": "ends", "after_s": time.monotonic() - began_s}
        except subprocess.TimeoutExpired:
            found = {"outcome": "goes on", "after_s": float(CTRL_C_S)}
        return {**found, **looked_at(run, world, written)}


def resume(name: str, world: World, folder: Path, rng: random.Random) -> Run:
    """The training is killed and started again, and goes on from what it saved at every tenth batch."""
    task = world.task(folder, save_steps=SAVE_STEPS)
    with training(name, task) as run:
        try:
            run.wait_for_batches(moment(world, rng))
        except RuntimeError:
            if not run.entries() or run.process.poll() is None:
                raise
            return {**outcome(run, world, time.monotonic()), **result(run, world), "saved": False}
        run.process.kill()
        run.process.wait()
    for name_ in ("address", *(f"worker-{number}" for number in range(SERVERS))):
        (folder / name_).unlink(missing_ok=True)
    with training(name, task) as run:
        return {**outcome(run, world, time.monotonic()), **result(run, world), "saved": True}


@dataclass(frozen=True)
class Accident:
    """``happen`` makes a run, ``shown`` says in words what happened; ``alone``: nothing else may run beside it."""

    title: str
    happen: Callable[[str, World, Path, random.Random], Run]
    shown: Callable[[Run], str]
    alone: bool = False


# ------------------------------------------------------------------------------------------------------ table
# What happened, in words. A run of digits between # is a figure: of runs that differ in figures only, the range.


def figure(value: float, spec: str = "d") -> str:
    return f"#{value:{spec}}#"


def how_it_ended(run: Run) -> str:
    if run["epoch_ended"]:
        how = f"epoch ends {figure(run['after_s'], '.1f')} s later"
    elif run["errors"]:
        how = f"error {figure(run['after_s'], '.1f')} s later: {first_words(run['errors'][-1])}"
    elif run["outcome"] == "hangs":
        return "hangs"
    else:
        return f"its process ends with status {run['status']}"
    return how + {"hangs": ", and its process does not end", "ends": "", "error": ""}[run["outcome"]]


def without_time(how: str) -> str:
    return re.sub(r" #[\d.]+# s later", "", how)


def first_words(error: str) -> str:
    """The first line of an error without what differs from run to run; of a worker's with a traceback, its error."""
    lines = [line for line in error.split("\n") if line.strip()]
    errors = [line for line in lines[1:] if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    line = errors[-1] if errors and "Traceback" in error else lines[0]
    line = re.sub(r"b'[^']*'?|\{+[^}]*\}+|0x[0-9a-f]+|/\S+/", "…", line)
    line = re.sub(r"\d{2,}|process \d", "…", line).replace("|", "/")
    return f"`{line[:110]}{'…' if len(line) > 110 else ''}`"


def records(run: Run) -> str:
    if not run["epoch_ended"]:
        return ""
    lost, repeated = (figure(run[what]) if run[what] else "0" for what in ("lost", "repeated"))
    altered = f", {figure(run['altered'])} altered" if run["altered"] else ""
    return f", {lost} lost, {repeated} repeated{altered}"


def shown_order(run: Run) -> str:
    order = {True: ", same order", False: ", another order", None: ""}[run.get("same_order")]
    return how_it_ended(run) + records(run) + (order if run["epoch_ended"] else "")


def shown_worker(run: Run) -> str:
    return "no worker processes" if run["outcome"] == "no processes" else shown_order(run)


def shown_noticed(run: Run) -> str:
    if run["epoch_ended"] and not run["num_errors"]:
        lost = f", {figure(run['lost'])} others lost" if run["lost"] else ""
        altered = f", {figure(run['altered'])} delivered altered" if run["altered"] else ""
        return f"not noticed: epoch ends{altered}{lost}"
    names = " and ".join(run["names"]) or "neither shard nor record nor offset"
    return without_time(how_it_ended(run)) + f" (names {names})"


def shown_skipped(run: Run) -> str:
    altered = f", {figure(run['altered'])} delivered altered" if run["altered"] else ""
    repeated = f", {figure(run['repeated'])} repeated" if run["repeated"] else ""
    lost = f"{figure(run['lost'])} others lost" if run["lost"] else "no other lost"
    ended = "" if run["outcome"] == "ends" else without_time(how_it_ended(run)) + "; "
    names = f"; names {' and '.join(run['names'])}" if run["names"] else "; names nothing"
    return f"{ended}{lost}{altered}{repeated}{names}"


def what_is_left(left: Mapping[str, Sequence[str]]) -> str:
    kinds = {"processes": "processes", "shm": "in /dev/shm", "tmp": "in TMPDIR"}
    return ", ".join(f"{figure(len(left[kind]))} {text}" for kind, text in kinds.items() if left[kind]) or "nothing"


def shown_left(run: Run) -> str:
    left = ", ".join(f"after {after_s} s {what_is_left(run['left'][str(after_s)])}" for after_s in LEFT_AFTER_S)
    return f"left {left}; {figure(run['stderr_lines'])} lines on stderr"


def shown_interrupted(run: Run) -> str:
    ended = f"ends after {figure(run['after_s'], '.1f')} s" if run["outcome"] == "ends" else f"runs on ({CTRL_C_S} s)"
    return f"{ended}; {shown_left(run)}"


def shown_resumed(run: Run) -> str:
    if not run["saved"]:
        return "cannot be saved: " + (first_words(run["errors"][-1]) if run["errors"] else "no means")
    return without_time(shown_order(run))


def shown_undisturbed(run: Run) -> str:
    left = f"; left: {what_is_left(run['left']['0'])}" if any(run["left"]["0"].values()) else ""
    return without_time(shown_order(run)) + left


ACCIDENTS = {
    "undisturbed": Accident("nothing", undisturbed, shown_undisturbed, alone=True),
    "kill_worker": Accident("SIGKILL of a worker", partial(signal_worker, signal.SIGKILL), shown_worker),
    "stop_worker": Accident("SIGSTOP of a worker", partial(signal_worker, signal.SIGSTOP), shown_worker),
    "flip": Accident("a bit of a record's values flipped", partial(damage, "flip", False), shown_noticed),
    "flip_skip": Accident("… and asked to go on", partial(damage, "flip", True), shown_skipped),
    "length": Accident("a bit of a length flipped", partial(damage, "length", False), shown_noticed),
    "length_skip": Accident("… and asked to go on", partial(damage, "length", True), shown_skipped),
    "truncated": Accident("a shard cut inside a record", partial(damage, "truncated", False), shown_noticed),
    "truncated_skip": Accident("… and asked to go on", partial(damage, "truncated", True), shown_skipped),
    "kill_training": Accident("SIGKILL of the training", kill_training, shown_left, alone=True),
    "interrupt": Accident("Ctrl-C", interrupt, shown_interrupted, alone=True),
    "resume": Accident("SIGKILL of the training, started again", resume, shown_resumed),
}


def cell(runs: Sequence[Run], shown: Callable[[Run], str]) -> str:
    """What happened in each of the runs: once where it was the same, figures as ranges; else how often what."""
    by_fact: dict[str, list[list[str]]] = {}
    for run in runs:
        text = shown(run)
        by_fact.setdefault(re.sub(r"#([\d.]+)#", "#", text), []).append(re.findall(r"#([\d.]+)#", text))
    facts = []
    for fact, figures in sorted(by_fact.items(), key=lambda item: -len(item[1])):
        for values in zip(*figures, strict=True):
            low, high = min(values, key=float), max(values, key=float)
            fact = fact.replace("#", low if low == high else f"{low}–{high}", 1)
        facts.append(fact if len(by_fact) == 1 else f"{len(figures)} of {len(runs)}: {fact}")
    return "; ".join(facts) or "–"


# -------------------------------------------------------------------------------------------------------- runs


def run_one(name: str, accident: str, round_: int, world: World, folder: Path) -> Run:
    own = folder / f"{name}-{accident}-{round_}"
    own.mkdir()
    found = ACCIDENTS[accident].happen(name, world, own, random.Random(f"{accident} {round_}"))
    shutil.rmtree(own)
    return {"library": name, "accident": accident, "round": round_, **found}


def compare_orders(runs: list[Run]) -> None:
    """Each run that delivered an epoch gets ``same_order``: as the first one of its library that nothing disturbed.

    None where two undisturbed runs differ: the library promises no order.
    """
    for name in {run["library"] for run in runs}:
        ours = [run for run in runs if run["library"] == name and "keys_digest" in run]
        first = {run["keys_digest"] for run in ours if run["accident"] == "undisturbed"}
        for run in ours:
            if run["accident"] == "undisturbed" or len(first) == 1:
                run["same_order"] = first == {run["keys_digest"]}


def versions_of(names: Iterable[str]) -> dict[str, str]:
    packages = dict.fromkeys(package for name in names for package in LIBRARIES[name].packages)
    distributions = metadata.packages_distributions()
    return {package: metadata.version(distributions[package][0]) for package in packages}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--accidents", nargs="+", choices=ACCIDENTS, default=list(ACCIDENTS))
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.01, help="what a training step takes")
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="without progress: it hangs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    missing = {
        name: [package for package in LIBRARIES[name].packages if util.find_spec(package) is None]
        for name in options.libraries
    }
    names = [name for name in options.libraries if not missing[name]]
    versions = versions_of(names)
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        sizes = {"batch_size": options.batch_size, "step_s": options.step_seconds, "limit_s": options.limit_seconds}
        world = make_world(Path(folder), options.records, options.shards, **sizes)
        runs: list[Run] = []

        def run_all(alone: bool, jobs: int) -> None:
            chosen = [accident for accident in options.accidents if ACCIDENTS[accident].alone == alone]
            with ThreadPoolExecutor(jobs) as pool:
                futures = {
                    (name, accident, round_): pool.submit(run_one, name, accident, round_, world, Path(folder))
                    for round_ in range(options.rounds)
                    for accident in chosen
                    for name in names
                }
                for (name, accident, round_), future in futures.items():
                    runs.append({**future.result(), "versions": versions})
                    sys.stderr.write(f"{name} {accident} {round_}: {ACCIDENTS[accident].shown(runs[-1])}\n")

        run_all(alone=False, jobs=options.jobs)
        run_all(alone=True, jobs=1)
    compare_orders(runs)
    rows = [
        (
            ACCIDENTS[accident].title,
            *(
                cell([run for run in runs if (run["library"], run["accident"]) == (name, accident)], how)
                for name in names
            ),
        )
        for accident in options.accidents
        for how in [ACCIDENTS[accident].shown]
    ]
    notes = [
        f"{options.records:,} records in {options.shards} shards, batches of {options.batch_size}, steps of "
        f"{options.step_seconds * 1e3:.0f} ms; {options.rounds} runs a cell, each disturbed at another batch; what had "
        f"neither progress nor an end for {options.limit_seconds:.0f} s hangs",
        *(f"{LIBRARIES[name].title} left out: no {', '.join(gone)} here" for name, gone in missing.items() if gone),
    ]
    publish(("", *(LIBRARIES[name].title for name in names)), rows, notes, runs, options)


if __name__ == "__main__":
    main()
