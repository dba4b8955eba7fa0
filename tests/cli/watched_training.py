"""A training for those who watch: python watched_training.py SHARDS SLEEP_S; ends with its standard input."""

from __future__ import annotations

import sys
import threading
import time

import loaderd

schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)


def end() -> None:
    sys.stdin.read()
    over.set()


over = threading.Event()
threading.Thread(target=end, daemon=True).start()
with loaderd.Loader(sys.argv[1], schema, batch_size=64, epochs=None, workers=1) as loader:
    for step, _ in enumerate(loader):
        if step == 0:
            print("begun", flush=True)
        if over.is_set():
            break
        time.sleep(float(sys.argv[2]))
