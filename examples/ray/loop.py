"""Takes batches of a data set that a Ray cluster serves, in a plain loop.

    python examples/ray/loop.py

It uses the cluster of ``RAY_ADDRESS``; if that is not set, Ray starts one on this machine. ``datasets.py`` says which
shards it reads; ``make demo-chess`` writes them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import loaderd_ray
import ray


def main() -> None:
    # The servers must be able to import ``datasets``. On a cluster, give ray.init runtime_env={"working_dir": …}.
    sys.path.insert(0, str(Path(__file__).parent))
    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False)
    loaderd_ray.serve("datasets:train", name="chess-loop")
    try:
        with loaderd_ray.connect("chess-loop", batch_size=512, epochs=3) as loader:
            began_s = time.perf_counter()
            num_records = sum(len(batch["score"]) for batch in loader)
        print(f"{num_records:,} records, {num_records / (time.perf_counter() - began_s):,.0f} a second")
        for server in loaderd_ray.status("chess-loop"):
            print(f"server at {server.address}, process {server.pid}, started again {server.restarts} times")
    finally:
        loaderd_ray.stop("chess-loop")


if __name__ == "__main__":
    main()
