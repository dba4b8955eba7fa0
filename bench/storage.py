"""How fast shards are read from an object store far away, and what becomes of it when the store has trouble.

S3 is moto's server on this machine, behind a proxy that adds ``--delay-ms`` to each answer (``distant_s3.py``). Each
run is a process; the first epoch is not counted. ``--against FOLDER`` runs another version's checkout in turn.

    python bench/storage.py --against ../before
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distant_s3 import ENVIRONMENT, DistantS3
from harness.synthetic import write_shards

ROOT = Path(__file__).parent.parent

_RUN = """
import json, sys, time, loaderd
uri, block_records, epochs, cache = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
shuffle = loaderd.Shuffle(window_records=32768, block_records=block_records)
began = time.perf_counter()
loader = loaderd.Loader(
    uri, loaderd.schemas.chess_eval(), batch_size=512, epochs=epochs, workers=2, index_cache=cache, shuffle=shuffle
)
opened, records, counted, start = time.perf_counter() - began, loader.statistics().num_records, 0, None
for batch in loader:
    if start is not None:
        counted += len(batch["score"])
    elif loader.statistics().records_delivered >= records:
        start = time.perf_counter()
print(json.dumps({"examples_per_s": round(counted / (time.perf_counter() - start)), "open_s": round(opened, 2)}))
"""


def run(folder: Path, uri: str, block_records: int, epochs: int, cache: str) -> dict[str, float]:
    """One run of the version in ``folder``."""
    paths = os.pathsep.join([str(folder), str(folder / "bindings")])
    done = subprocess.run(
        [sys.executable, "-c", _RUN, uri, str(block_records), str(epochs), cache],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--block-records", type=int, nargs="+", default=[1024, 256])
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--against", type=Path, help="the checkout of another version, to be run in turn")
    options = parser.parse_args()
    versions = {"here": ROOT, **({"against": options.against.resolve()} if options.against else {})}
    with tempfile.TemporaryDirectory() as scratch, DistantS3() as store:
        for path in write_shards(f"{scratch}/shards", options.records, num_shards=options.shards):
            store.put(path.name, path.read_bytes())
        store.delay_s = options.delay_ms / 1000
        for block_records in options.block_records:
            found: dict[str, list[float]] = {name: [] for name in versions}
            for _ in range(options.rounds):
                for name, folder in versions.items():
                    epochs = options.epochs if name == "here" else 2
                    cache = f"{scratch}/index-{name}"
                    result = run(folder, store.uri("*.tfrecord"), block_records, epochs, cache)
                    found[name].append(result["examples_per_s"])
                    time.sleep(1.0)
            medians = {name: statistics.median(values) for name, values in found.items()}
            line = {"block_records": block_records, "delay_ms": options.delay_ms, **medians, "all": found}
            if "against" in medians:
                line["times"] = round(medians["here"] / medians["against"], 1)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
