"""The training process: takes an epoch batch by batch and logs what it got. Arguments: the library, a Task as JSON."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from trainers import Task, keys_of

MAX_ERRORS = 50
MAX_DATA_BYTES = 8 << 30  # a reader that believes a damaged length shall fail, not take the machine's memory


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    task = Task(**json.loads(sys.argv[2]))
    log = os.open(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(entry: dict[str, Any]) -> None:
        os.write(log, json.dumps(entry).encode() + b"\n")

    latest, num_batches, num_errors = Path(task.folder, "latest.json"), 0, 0
    saved = None
    if latest.exists():
        found = json.loads(latest.read_text())
        saved, num_batches = Path(found["path"]), found["num_batches"]
        os.truncate(log, found["log_bytes"])  # the weights are those of the checkpoint: what came later is undone
    module = importlib.import_module(f"trainers.{sys.argv[1]}")
    try:
        epoch = module.Epoch(task, saved)
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    while True:
        try:
            d, s = next(epoch)
        except StopIteration:
            write({"end": True})
            break
        except Exception as error:
            write({"error": f"{type(error).__name__}: {error}"})
            num_errors += 1
            if not task.skip or num_errors == MAX_ERRORS:
                raise
            continue
        write({"keys": keys_of(d, s)})
        del d, s
        num_batches += 1
        if task.save_steps and num_batches % task.save_steps == 0:
            path = Path(task.folder, f"saved-{num_batches}")
            epoch.save(path)
            unfinished = latest.with_suffix(".unfinished")
            place = {"path": str(path), "num_batches": num_batches, "log_bytes": os.fstat(log).st_size}
            unfinished.write_text(json.dumps(place))
            unfinished.replace(latest)
        time.sleep(task.step_s)
    if reported := epoch.close():
        write({"reported": reported})


if __name__ == "__main__":  # a library that spawns its workers imports this file in each of them
    main()
