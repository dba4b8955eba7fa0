"""The same accidents with loaderd, tf.data, tf.data service, PyTorch's DataLoader and Grain: what happens.

::

    python bench/reliability.py [--rounds 5] [--libraries loaderd …] [--accidents kill_worker …] [--jobs 2]

Each run is a training in a process of its own (``trainers/``, a module a library, which says how it is configured)
over one epoch of records that carry their number and are known. It is disturbed once, at a batch between 0.5 % and
2 % of the epoch that the round decides: what reads far ahead (tf.data service: hundreds of batches) has done all of
its work in the middle of a short epoch. Seen from outside:

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

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata, util
from itertools import product
from pathlib import Path
from typing import Any

from competitors import LIBRARIES
from harness.questions import parser_of, publish
from harness.synthetic import shard_records, write_shards
from trainers import RECORD_BYTES, Task, keys_of, told
from trainers.told import CTRL_C_S, LEFT_AFTER_S, Run
from trainers.training import SERVERS, STARTS_WITHIN_S, Training, has_open, training

HEADER_BYTES, FOOTER_BYTES = 12, 4  # of a record in a shard
SAVE_STEPS = 10


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
    """``number`` to one worker that has a shard open, or to any if none has.

    ``idle``: no server of a service has one: all of the epoch was read ahead, and the accident shows nothing.
    """
    if LIBRARIES[name].worker is None:
        return {"outcome": "no processes"}
    with training(name, world.task(folder)) as run:
        run.wait_for_batches(moment(world, rng))
        written = run.errors.stat().st_size
        workers = run.workers()
        if not workers:
            raise RuntimeError(f"{name}: no worker among {run.alive()}")
        reading = [pid for pid in workers if has_open(pid, Path(world.shards[0]).parent)]
        began_s = time.monotonic()
        os.kill(rng.choice(reading or workers), number)
        idle = LIBRARIES[name].service and not reading  # a worker of loaderd opens a shard for a moment only
        return {"idle": idle, **outcome(run, world, began_s), **result(run, world, errors_from=written)}


def moment(world: World, rng: random.Random) -> int:
    return rng.randint(1 + world.num_batches // 200, 1 + world.num_batches // 50)


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
            run.wait_for_batches(max(SAVE_STEPS + 5, moment(world, rng)))
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


ACCIDENTS = {
    "undisturbed": Accident("nothing", undisturbed, told.shown_undisturbed, alone=True),
    "kill_worker": Accident("SIGKILL of a worker", partial(signal_worker, signal.SIGKILL), told.shown_worker),
    "stop_worker": Accident("SIGSTOP of a worker", partial(signal_worker, signal.SIGSTOP), told.shown_worker),
    "flip": Accident("a bit of a record's values flipped", partial(damage, "flip", False), told.shown_noticed),
    "flip_skip": Accident("… and asked to go on", partial(damage, "flip", True), told.shown_skipped),
    "length": Accident("a bit of a length flipped", partial(damage, "length", False), told.shown_noticed),
    "length_skip": Accident("… and asked to go on", partial(damage, "length", True), told.shown_skipped),
    "truncated": Accident("a shard cut inside a record", partial(damage, "truncated", False), told.shown_noticed),
    "truncated_skip": Accident("… and asked to go on", partial(damage, "truncated", True), told.shown_skipped),
    "kill_training": Accident("SIGKILL of the training", kill_training, told.shown_left, alone=True),
    "interrupt": Accident("Ctrl-C", interrupt, told.shown_interrupted, alone=True),
    "resume": Accident("SIGKILL of the training, started again", resume, told.shown_resumed),
}


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


def run_all(names: Sequence[str], options: argparse.Namespace, folder: Path) -> list[Run]:
    """Every library, every accident, every round; those that must run alone come last, one at a time."""
    sizes = {"batch_size": options.batch_size, "step_s": options.step_seconds, "limit_s": options.limit_seconds}
    world = make_world(folder, options.records, options.shards, **sizes)
    versions = versions_of(names)
    runs: list[Run] = []
    for alone, jobs in ((False, options.jobs), (True, 1)):
        chosen = [accident for accident in options.accidents if ACCIDENTS[accident].alone == alone]
        planned = list(product(range(options.rounds), chosen, names))
        with ThreadPoolExecutor(jobs) as pool:
            done = pool.map(lambda each: run_one(each[2], each[1], each[0], world, folder), planned)
            for (round_, accident, name), run in zip(planned, done, strict=True):
                runs.append({**run, "versions": versions})
                sys.stderr.write(f"{name} {accident} {round_}: {ACCIDENTS[accident].shown(runs[-1])}\n")
    return runs


def table_of(names: Sequence[str], accidents: Sequence[str], runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row an accident: its title, and for each library what happened in its runs."""

    def cell(name: str, accident: str) -> str:
        of_cell = [run for run in runs if (run["library"], run["accident"]) == (name, accident)]
        return told.cell(of_cell, ACCIDENTS[accident].shown)

    return [(ACCIDENTS[accident].title, *(cell(name, accident) for name in names)) for accident in accidents]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--accidents", nargs="+", choices=ACCIDENTS, default=list(ACCIDENTS))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.002, help="what a training step takes")
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="without progress: it hangs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    missing = {
        name: [package for package in LIBRARIES[name].packages if util.find_spec(package) is None]
        for name in options.libraries
    }
    names = [name for name in options.libraries if not missing[name]]
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        runs = run_all(names, options, Path(folder))
    compare_orders(runs)
    notes = [
        f"{options.records:,} records in {options.shards} shards, batches of {options.batch_size}, steps of "
        f"{options.step_seconds * 1e3:.0f} ms; each round disturbs at another batch; "
        f"what had neither progress nor an end for {options.limit_seconds:.0f} s hangs",
        *(f"{LIBRARIES[name].title} left out: no {', '.join(gone)} here" for name, gone in missing.items() if gone),
    ]
    titles = ("", *(LIBRARIES[name].title for name in names))
    publish(titles, table_of(names, options.accidents, runs), notes, runs, options)


if __name__ == "__main__":
    main()
