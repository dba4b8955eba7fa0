"""The kill test: signals at random moments to workers and the daemon, while records with known numbers come.

::

    python -m tests.reliability.torture [--signals 1000] [--kinds kill-worker=6 stop-worker=2 …] [--seed 0]

A thread sends SIGKILL and SIGSTOP to the loader's processes (to what workers are forks of, too), whatever they are at
(starting, too), sometimes to several at once. Each record must come once an epoch, in the order in which an
undisturbed loader delivers it, and nothing may be left at the end. Prints what happened as a line of JSON; the exit
status is 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

import loaderd
from tests.reliability.numbered import SCHEMA, numbers_of, write_shards
from tests.reliability.processes import (
    DAEMON,
    FORKS,
    MARK,
    WORKER,
    age_s,
    marked,
    name_of,
    num_fds,
    roles,
    send,
    shm_names,
    state_of,
    wait_for_none,
)

KINDS = {
    **{"kill-worker": 6.0, "stop-worker": 2.0, "kill-daemon": 1.0, "stop-daemon": 0.5},
    **{"kill-forks": 0.5, "stop-forks": 0.3},
}
_ROLES = {"worker": WORKER, "daemon": DAEMON, "forks": FORKS}
_SIZES = (9_000, 1_000, 6_500, 3_500)
_BATCH_SIZE = 50
_BATCHES_PER_SIGNAL = 60
_NO_SESSION = -1  # what is looked for has our own
_END_LIMIT_S = 30.0  # what close() has had to kill is dead by then, on a busy machine


@dataclass
class Figures:
    """What happened, and what went wrong: ``records_lost`` to ``left`` must be 0 or empty."""

    signals: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    batches: int = 0
    records: int = 0
    seconds: float = 0.0
    longest_wait_s: float = 0.0
    in_longest_wait: list[str] = field(default_factory=list)
    """The signals of that wait and of the second before: seconds since it began, what, how old its victim was."""
    workers_restarted: int = 0
    daemon_restarts: int = 0
    warnings: int = 0
    records_lost: int = 0
    records_repeated: int = 0
    batches_that_differ: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.records_lost or self.records_repeated or self.batches_that_differ or self.left)


class Tormentor(threading.Thread):
    """Sends signals, each some batches after the one before: so whatever it does, the run comes to an end."""

    def __init__(self, mark: str, kinds: dict[str, float], num_signals: int, rng: random.Random) -> None:
        super().__init__(name="tormentor")
        self.sent: Counter[str] = Counter()
        self.last: deque[tuple[float, str]] = deque(maxlen=20)
        """Of the last signals: when (``time.perf_counter``), and what, to a process of which age."""
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._mark = mark
        self._kinds = kinds
        self._num_signals = num_signals
        self._rng = rng
        self._batches = threading.Semaphore(0)
        self.batch_came = self._batches.release

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()

    def _run(self) -> None:
        while self.sent.total() < self._num_signals and not self.over.is_set():
            for _ in range(self._rng.randrange(2 * _BATCHES_PER_SIGNAL)):
                self._batches.acquire()
            self.over.wait(self._rng.uniform(0, 0.02))  # between two batches, not always when one has come
            (kind,) = self._rng.choices(list(self._kinds), list(self._kinds.values()))
            several = kind == "kill-worker" and self._rng.random() < 0.2
            for _ in range(self._rng.randint(2, 4) if several else 1):
                self._torment(kind)

    def _torment(self, kind: str) -> None:
        what, _, whom = kind.partition("-")
        victims = roles(self._mark, _ROLES[whom])
        if what == "stop":
            # A process that starts is given a minute and more; that wait is for another test.
            victims = [pid for pid in victims if state_of(pid) != "T" and name_of(pid).startswith("loaderd-")]
        if victims:
            number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
            pid = self._rng.choice(victims)
            self.last.append((time.perf_counter(), f"{kind}, {age_s(pid):.2f} s old"))
            self.sent[kind] += send(pid, number, self._mark)

    def between(self, begin_s: float, end_s: float) -> list[str]:
        """The signals that were sent then."""
        return [f"{when - begin_s - 1:.2f} s: {what}" for when, what in tuple(self.last) if begin_s < when < end_s]

    def end(self) -> None:
        """Have it end, wherever it is."""
        self.over.set()
        self._batches.release(2 * _BATCHES_PER_SIGNAL)
        self.join()


def make_loader(shards: Sequence[str], workers: int, stall_timeout: float | None, folder: Path) -> loaderd.Loader:
    return loaderd.Loader(
        shards,
        SCHEMA,
        batch_size=_BATCH_SIZE,
        epochs=None,
        shuffle=loaderd.Shuffle(window_records=3_000, block_records=100),
        seed=7,
        workers=workers,
        index_cache=str(folder / "index"),
        stall_timeout=stall_timeout,
    )


def torture(
    folder: Path,
    kinds: dict[str, float],
    num_signals: int,
    *,
    workers: int = 3,
    stall_timeout: float = 2.0,
    seed: int = 0,
) -> Figures:
    """Epochs until so many signals are sent, and then to the end of the epoch."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    shards = write_shards(folder / "shards", _SIZES)
    num_records = sum(_SIZES)
    fds_before = num_fds(os.getpid())
    warnings = folder / "warnings"
    handler = logging.FileHandler(warnings)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("loaderd")
    logger.addHandler(handler)
    logger.propagate = False
    figures = Figures()
    tormentor = Tormentor(mark, kinds, num_signals, random.Random(seed))
    digests: list[int] = []
    began_s = time.perf_counter()
    try:
        with make_loader(shards, workers, stall_timeout, folder) as loader:
            tormentor.start()
            seen = np.zeros(num_records, np.int64)
            batches = iter(loader)
            while True:
                asked_s = time.perf_counter()
                numbers = numbers_of(next(batches))
                if (waited_s := time.perf_counter() - asked_s) > figures.longest_wait_s:
                    figures.longest_wait_s = waited_s
                    figures.in_longest_wait = tormentor.between(asked_s - 1, asked_s + waited_s)
                tormentor.batch_came()
                seen += np.bincount(numbers, minlength=num_records)
                digests.append(zlib.crc32(numbers.tobytes()))
                del numbers
                if len(digests) % loader.batches_per_epoch == 0:
                    figures.epochs += 1
                    figures.left += shm_names([os.getpid(), *marked(mark)])  # for nobody would clear it up
                    figures.records_lost += int((seen == 0).sum())
                    figures.records_repeated += int((seen > 1).sum())
                    seen[:] = 0
                    if tormentor.over.is_set():
                        break
            statistics = loader.statistics()
            figures.records = statistics.records_delivered
            figures.workers_restarted = statistics.workers_restarted
            figures.daemon_restarts = statistics.daemon_restarts
            del batches
    finally:
        tormentor.end()
        figures.signals = tormentor.sent
        figures.batches, figures.seconds = len(digests), time.perf_counter() - began_s
        logger.propagate = True
        logger.removeHandler(handler)
        handler.close()
        figures.warnings = warnings.read_text().count("\n")
    if tormentor.error is not None:
        raise tormentor.error
    del loader, statistics
    gc.collect()
    left = wait_for_none(mark, _NO_SESSION, time.monotonic() + _END_LIMIT_S)
    figures.left += [f"process {pid} ({name_of(pid)})" for pid in left]
    figures.left += [str(path) for path in (folder / "index").rglob("*") if path.suffix == ".tmp"]
    if num_fds(os.getpid()) != fds_before:
        figures.left.append(f"{num_fds(os.getpid()) - fds_before} file descriptors")
    with make_loader(shards, workers, None, folder) as loader:
        undisturbed = [zlib.crc32(numbers_of(batch).tobytes()) for batch in islice(loader, len(digests))]
    figures.batches_that_differ = sum(map(int.__ne__, digests, undisturbed))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=1_000)
    parser.add_argument("--kinds", nargs="+", default=[f"{kind}={weight}" for kind, weight in KINDS.items()])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--stall-timeout", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="kept, with the loader's warnings in it; without it, a temporary one"
    )
    args = parser.parse_args()
    kinds = {kind: float(weight or 1) for kind, _, weight in (item.partition("=") for item in args.kinds)}
    if unknown := kinds.keys() - KINDS.keys():
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        figures = torture(
            Path(folder),
            kinds,
            args.signals,
            workers=args.workers,
            stall_timeout=args.stall_timeout,
            seed=args.seed,
        )
    print(json.dumps(vars(figures)))
    return 0 if figures.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
