"""Servers on the network and their processes are killed at random, beside four consumers that share each epoch.

::

    python -m tests.reliability.servers_killed [--seconds 600] [--seed 0]

Twice a second, one of the processes of two servers is killed, or a whole server, which is started again at once at
the same address. Each consumer must get the batches that an undisturbed loader with its ``shard=(i, 4)`` makes, in
that order, and together every record once an epoch. Prints figures as a line of JSON; the exit status is 1
if anything went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import loaderd
from tests.reliability.numbered import SCHEMA, write_shards
from tests.remote.network_server import NetworkServer

_HOSTS = 4
_SIZES = (9_000, 1_000, 6_500, 3_500)
_BATCH_SIZE = 64
_EVERY_S = 0.5
_WHOLE_SERVER = 0.05
_MODULE = """
import sys
sys.path.insert(0, {folder!r})
import loaderd
from numbered import SCHEMA
train = loaderd.Dataset("shards/*", SCHEMA, shuffle=loaderd.Shuffle(window_records=3_000, block_records=100))
"""


class Killer(threading.Thread):
    """Kills until ``over`` is set; ``kills``: how many of which kind."""

    def __init__(self, servers: list[NetworkServer], rng: random.Random) -> None:
        super().__init__()
        self._servers, self._rng = servers, rng
        self.over = threading.Event()
        self.kills: Counter[str] = Counter()

    def run(self) -> None:
        while not self.over.wait(_EVERY_S):
            server = self._rng.choice(self._servers)
            if self._rng.random() < _WHOLE_SERVER:
                server.restart()
                self.kills["server"] += 1
            elif pids := server.server.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(pids), signal.SIGKILL)
                    self.kills["process"] += 1


class Consumer(threading.Thread):
    """Takes epochs until ``over`` is set, and compares each batch with the plan. ``wrong``: what is not so."""

    def __init__(self, addresses: list[str], dataset: loaderd.Dataset, host: int, over: threading.Event) -> None:
        super().__init__()
        self._addresses, self._dataset, self._host, self._over = addresses, dataset, host, over
        self.num_records = self.num_epochs = 0
        self.longest_wait_s = 0.0
        self.numbers_of_epoch: list[set[int]] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            self._compare()
        except BaseException as error:
            self.wrong.append(f"host {self._host}: {type(error).__name__}: {error}")

    def _compare(self) -> None:
        shard = self._host, _HOSTS
        options = {"batch_size": _BATCH_SIZE, "epochs": None, "workers": 1, "shard": shard}
        with (
            loaderd.connect(self._addresses, "train", **options) as loader,
            loaderd.Loader(self._dataset, **options) as planned,
        ):
            numbers: set[int] = set()
            batches, epoch, waited_s = iter(loader), 0, time.monotonic()
            for expected in planned:
                batch = next(batches)
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - waited_s)
                if batch["n"].tolist() != expected["n"].tolist() or (batch["square"] != batch["n"] ** 2).any():
                    self.wrong.append(
                        f"host {self._host}: a batch of epoch {loader.position.epoch} is not as planned"
                    )
                if planned.position.epoch != epoch:
                    self.numbers_of_epoch.append(numbers | set(batch["n"].tolist()))
                    numbers, epoch = set(), planned.position.epoch
                    self.num_epochs += 1
                    if self._over.is_set():
                        return
                else:
                    numbers.update(batch["n"].tolist())
                self.num_records += batch.num_records
                waited_s = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    servers: list[NetworkServer] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shards = write_shards(folder / "shards", _SIZES)
        module = _MODULE.format(folder=str(Path(__file__).parent))
        dataset = loaderd.Dataset(shards, SCHEMA, shuffle=loaderd.Shuffle(window_records=3_000, block_records=100))
        try:
            servers += [NetworkServer(folder, module=module) for _ in range(2)]
            killer = Killer(servers, random.Random(args.seed))
            over = threading.Event()
            consumers = [Consumer([each.address for each in servers], dataset, host, over) for host in range(_HOSTS)]
            for thread in (killer, *consumers):
                thread.start()
            over.wait(args.seconds)
            over.set()
            for consumer in consumers:
                consumer.join()
            killer.over.set()
            killer.join()
        finally:
            for server in servers:
                server.close()
    wrong = [text for consumer in consumers for text in consumer.wrong]
    # A host may have come further than another: what all have taken is compared.
    for epoch, parts in enumerate(zip(*(consumer.numbers_of_epoch for consumer in consumers), strict=False)):
        if len(set.union(*parts)) != sum(_SIZES) or sum(map(len, parts)) != sum(_SIZES):
            wrong.append(f"epoch {epoch}: {sum(map(len, parts))} records, expected {sum(_SIZES)}, each once")
    figures = {
        "kills": killer.kills,
        "epochs": [consumer.num_epochs for consumer in consumers],
        "records": sum(consumer.num_records for consumer in consumers),
        "longest_wait_s": round(max(consumer.longest_wait_s for consumer in consumers), 1),
        "wrong": wrong,
    }
    print(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
