"""Consumers of a server, of every kind, that check what they get while others do their worst.

::

    python -m tests.reliability.readers UNIX_PATH [http://HOST:PORT]

Each reads epochs until a line comes on standard input, and then to the end of the epoch: of each epoch every record
must come once, and those that get whole epochs must get them in the same order. Prints a line when all have begun;
at the end one of JSON: what each has read, the longest that one waited for a batch, and what went wrong.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import loaderd
from tests.reliability.numbered import Int64s, numbers_of

BATCH_SIZE = 100
_PAUSE_S = 0.02  # they are to be there, not to need all of the machine
_START_LIMIT_S = 120.0

Epoch = Callable[[], Iterator[Int64s]]
"""Gives the numbers of each batch of the next epoch."""


class Readers:
    """All of them, each in a thread, and what they tell of themselves."""

    def __init__(self, num_records: int) -> None:
        self.over = threading.Event()
        self.began = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []
        self.batches: Counter[str] = Counter()
        self.epochs: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_wait_s = 0.0
        self._num_records = num_records
        self._orders: dict[int, int] = {}

    def add(self, name: str, *members: Epoch) -> None:
        """Members that share each epoch; a single one gets all of it, in the order that all such get it in."""
        seen = np.zeros(self._num_records, np.int64)
        lock = threading.Lock()
        digests = [0] * len(members)
        is_last = False

        def end_epoch() -> None:
            nonlocal is_last
            if seen.min() != 1 or seen.max() != 1:
                lost, again = int((seen == 0).sum()), int((seen > 1).sum())
                self.wrong.append(f"{name}: {lost} records lost, {again} repeated in epoch {self.epochs[name]}")
            if len(members) == 1 and self._orders.setdefault(self.epochs[name], digests[0]) != digests[0]:
                self.wrong.append(f"{name}: another order than others in epoch {self.epochs[name]}")
            seen[:] = 0
            self.epochs[name] += 1
            is_last = self.over.is_set()

        together = threading.Barrier(len(members), end_epoch)

        def read(member: int) -> None:
            try:
                while not is_last:
                    digests[member] = 0
                    for numbers in self._timed(members[member]()):
                        digests[member] = zlib.crc32(numbers.tobytes(), digests[member])
                        with lock:
                            np.add.at(seen, numbers, 1)  # a record that comes again in a batch counts again
                            self.batches[name] += 1
                            if self.batches[name] == 1:
                                self.began.release()
                        time.sleep(_PAUSE_S)
                    together.wait()
            except threading.BrokenBarrierError:
                pass  # another member has said what is wrong
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error!s:.500}")
                together.abort()

        for member in range(len(members)):
            self.threads.append(threading.Thread(target=read, args=(member,), daemon=True))
            self.threads[-1].start()

    def _timed(self, batches: Iterator[Int64s]) -> Iterator[Int64s]:
        while True:
            asked_s = time.monotonic()
            numbers = next(batches, None)
            if numbers is None:
                return
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - asked_s)
            yield numbers


def epochs_of(address: str, **options: Any) -> Epoch:
    """Those of a consumer of loaderd, whose connection must hold."""
    loader = loaderd.connect(address, dataset="train", batch_size=BATCH_SIZE, **options)

    def batches() -> Iterator[Int64s]:
        yield from map(numbers_of, loader)
        assert loader.statistics().daemon_restarts == 0, "it has had to connect again"

    return batches


def main() -> int:
    unix, *network = sys.argv[1:]
    address = f"unix://{unix}"
    first = loaderd.connect(address, dataset="train", batch_size=BATCH_SIZE)
    readers = Readers(first.statistics().num_records)
    first.close()
    readers.add("independent", epochs_of(address))
    readers.add("split", *[epochs_of(address, sharing="split", shard=(rank, 2)) for rank in range(2)])
    for name in ("mirrored 1", "mirrored 2"):
        readers.add(name, epochs_of(address, sharing="mirrored", consumers=2, group="m"))
    for address in network:
        readers.add("network", epochs_of(address, workers=1))
    for _ in range(4 + len(network)):
        assert readers.began.acquire(timeout=_START_LIMIT_S), f"not all begin: {readers.batches} {readers.wrong}"
    print("all read", flush=True)
    sys.stdin.readline()
    readers.over.set()
    for thread in readers.threads:
        thread.join()
    figures = {
        "batches": readers.batches,
        "epochs": readers.epochs,
        "longest_wait_s": round(readers.longest_wait_s, 3),
        "wrong": readers.wrong,
    }
    print(json.dumps(figures), flush=True)
    return 1 if readers.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
