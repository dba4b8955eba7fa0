"""The soak: hundreds of millions of small records, a worker killed every so many of them; what grows?

::

    python -m tests.reliability.soak [--records 500e6] [--limit-s 7200] [--consumer tf.data] [--kill-every 10e6]

The consumer adds up the numbers of each epoch, and drops its batches. Every few seconds memory, descriptors, threads
and shared memory of the consumer, the daemon and the workers are noted; the medians of the first sixth (behind a
warm-up) and of the last are compared. Prints a line of JSON; the exit status is 1 if an epoch had other records
than it should, or none came to its end.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loaderd
from tests.reliability.numbered import numbers_from, write_shards
from tests.reliability.processes import DAEMON, MARK, WORKER, num_fds, read, roles, send

SCHEMA = loaderd.Schema({"n": loaderd.Int64()}, {"n": loaderd.Array("n")})
_WARM_UP = 0.1


@dataclass
class Figures:
    """``flat``: for each quantity, medians of the first and of the last sixth of the run."""

    consumer: str
    records: int = 0
    epochs: int = 0
    wrong_sums: int = 0
    """Epochs in which other records came, or another number of them, than there are."""
    seconds: float = 0.0
    workers_killed: int = 0
    samples: int = 0
    flat: dict[str, tuple[float, float]] = field(default_factory=dict)


def sample(mark: str) -> dict[str, float]:
    """Of each role (of the workers, the largest or most): MiB, file descriptors, threads."""
    found: dict[str, float] = {}
    for role, pids in (
        ("consumer", [os.getpid()]),
        ("daemon", roles(mark, DAEMON)),
        ("worker", roles(mark, WORKER)),
    ):
        one = [
            {
                "rss_mib": _kib(pid, "status", b"VmRSS:") / 1024,
                "pss_mib": _kib(pid, "smaps_rollup", b"Pss:") / 1024,
                "threads": _kib(pid, "status", b"Threads:"),
                "fds": num_fds(pid),
                "shared_mib": _shared_bytes(pid) / 2**20,
            }
            for pid in pids
        ]
        found[f"{role} count"] = len(one)
        for quantity in one[0] if one else ():
            found[f"{role} {quantity}"] = max(of_one[quantity] for of_one in one)
    return found


def _kib(pid: int, name: str, what: bytes) -> int:
    """A line of a file of /proc/PID; 0 where the process is gone."""
    lines = read(pid, name).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(what)), 0)


def _shared_bytes(pid: int) -> int:
    """Mapped memory of ours."""
    ranges = [line.split()[0].split(b"-") for line in read(pid, "maps").splitlines() if b"memfd:loaderd" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def sums_of(consumer: str, shards: list[str], **options: Any) -> Iterator[tuple[int, int]]:
    """(records, sum of their numbers) of each batch."""
    if consumer == "tf.data":
        import loaderd_tf

        for element in loaderd_tf.make_dataset(shards, SCHEMA, **options):
            numbers = numbers_from(element["n"].numpy())
            yield len(numbers), int(numbers.sum())
    else:
        with loaderd.Loader(shards, SCHEMA, **options) as loader:
            for batch in loader:
                numbers = numbers_from(batch["n"])
                del batch
                yield len(numbers), int(numbers.sum())


def soak(
    folder: Path,
    num_records: int,
    consumer: str,
    *,
    sizes: list[int],
    kill_every: int,
    sample_every: int,
    limit_s: float = math.inf,
) -> Figures:
    """Epochs until there were so many records, or the time is over; it kills and samples every so many records."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    shards = write_shards(folder / "shards", sizes)
    of_epoch = sum(sizes)
    options = {"batch_size": 1000, "epochs": None, "workers": 2, "index_cache": str(folder / "index")}
    figures = Figures(consumer)
    rng = random.Random(0)
    samples: list[tuple[int, dict[str, float]]] = []
    kill_next, sample_next = kill_every, sample_every
    began_s = time.monotonic()
    records = total = 0
    for size, numbers in sums_of(consumer, shards, shuffle=loaderd.Shuffle(window_records=100_000), **options):
        records += size
        total += numbers
        figures.records += size
        if records >= of_epoch:
            figures.epochs += 1
            figures.wrong_sums += records != of_epoch or total != of_epoch * (of_epoch - 1) // 2
            # Where a record was lost or came again, a batch lies across the end: epochs are wrong from there on.
            records, total = records - of_epoch, 0
            if figures.records >= num_records:
                break
        if time.monotonic() - began_s >= limit_s:
            break
        if figures.records >= sample_next:
            sample_next += sample_every
            samples.append((figures.records, sample(mark)))
        if figures.records >= kill_next and (workers := roles(mark, WORKER)):  # busy machines may have none yet
            kill_next += kill_every
            figures.workers_killed += send(rng.choice(workers), signal.SIGKILL, mark)
    figures.seconds = time.monotonic() - began_s
    figures.samples = len(samples)
    figures.flat = compare(samples)
    return figures


def compare(samples: list[tuple[int, dict[str, float]]]) -> dict[str, tuple[float, float]]:
    """The medians of the first and of the last sixth, by records, behind the warm-up; empty without a sample."""
    if not samples:
        return {}
    last = samples[-1][0]
    warm = [(records, found) for records, found in samples if records >= _WARM_UP * last]
    sixth = (last - warm[0][0]) / 6
    first = [found for records, found in warm if records <= warm[0][0] + sixth]
    end = [found for records, found in warm if records >= last - sixth]

    def median(of: list[dict[str, float]], quantity: str) -> float:
        return round(statistics.median(found[quantity] for found in of if quantity in found), 1)

    return {quantity: (median(first, quantity), median(end, quantity)) for quantity in first[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=float, default=500e6)
    parser.add_argument("--consumer", choices=["loader", "tf.data"], default="loader")
    parser.add_argument("--kill-every", type=float, default=10e6, help="records")
    parser.add_argument("--sample-every", type=float, default=5e6, help="records")
    parser.add_argument("--limit-s", type=float, default=math.inf)
    args = parser.parse_args()
    logging.getLogger("loaderd").setLevel(logging.ERROR)  # of each worker that is killed there is a warning
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(
            Path(folder),
            int(args.records),
            args.consumer,
            sizes=[500_000] * 4,
            kill_every=int(args.kill_every),
            sample_every=int(args.sample_every),
            limit_s=args.limit_s,
        )
    print(json.dumps(vars(figures)))
    is_short = figures.records < args.records and math.isinf(args.limit_s)
    return 1 if figures.wrong_sums or not figures.epochs or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
