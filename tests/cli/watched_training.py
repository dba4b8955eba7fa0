"""A training for those who watch: python watched_training.py SHARDS STEP_S BATCH_S; ends with its standard input.

A step takes ``STEP_S`` seconds, and to make a batch ``BATCH_S``.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import loaderd

shards, step_s, batch_s = sys.argv[1], *map(float, sys.argv[2:])


def late(numbers: Any) -> Any:
    time.sleep(batch_s)
    return numbers


schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id"),
        **({"late": loaderd.Derived(late, "id", (), "int64")} if batch_s else {}),
    },
)


def end() -> None:
    sys.stdin.read()
    over.set()


over = threading.Event()
threading.Thread(target=end, daemon=True).start()
with loaderd.Loader(shards, schema, batch_size=64, epochs=None, workers=1) as loader:
    for step, _ in enumerate(loader):
        if step == 0:
            print("begun", flush=True)
        if over.is_set():
            break
        time.sleep(step_s)
