"""The training process: takes an epoch batch by batch and logs what it gets. Arguments: library, Task as JSON."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainers import Epoch, Task, keys_of

MAX_ERRORS = 50
MAX_DATA_BYTES = 8 << 30  # a reader that believes a damaged length shall fail, not take the machine's memory


class Log:
    """Each entry is one write: a process that is killed leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, **entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def write_error(self, error: Exception) -> None:
        self.write(error=f"{type(error).__name__}: {error}", at_s=time.monotonic())

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file).st_size


def train(library: str, task: Task, log: Log) -> None:
    """One epoch, or what is left of it. Raises what the library raises, unless it is asked to skip."""
    latest, num_batches, num_errors = Path(task.folder, "latest.json"), 0, 0
    saved = None
    if latest.exists():
        found = json.loads(latest.read_text())
        saved, num_batches = Path(found["path"]), found["num_batches"]
        os.truncate(task.log, found["log_bytes"])  # weights are those of the checkpoint: what came later is undone
    epoch: Epoch = importlib.import_module(f"trainers.{library}_epoch").Epoch(task, saved)
    while True:
        try:
            d, s = next(epoch)
        except StopIteration:
            log.write(end=True, at_s=time.monotonic())
            break
        except Exception as error:
            num_errors += 1
            if not task.skip or num_errors == MAX_ERRORS:
                raise
            log.write_error(error)
            continue
        log.write(keys=keys_of(d, s))
        del d, s
        num_batches += 1
        if task.save_steps and num_batches % task.save_steps == 0:
            path = Path(task.folder, f"saved-{num_batches}")
            epoch.save(path)
            unfinished = latest.with_suffix(".unfinished")
            place = {"path": str(path), "num_batches": num_batches, "log_bytes": log.num_bytes}
            unfinished.write_text(json.dumps(place))
            unfinished.replace(latest)
        time.sleep(task.step_s)
    if reported := epoch.close():
        log.write(reported=reported)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
    task = Task(**json.loads(sys.argv[2]))
    log = Log(task.log)
    try:
        train(sys.argv[1], task, log)
    except Exception as error:
        log.write_error(error)
        raise


if __name__ == "__main__":  # a library that spawns its workers imports this file in each of them
    main()
