"""From KataGo's raw self-play files to batches: loaderd beside a shuffle pass and a loader of its results.

::

    python bench/katago_selfplay.py [--rows 200000] [--rounds 3] [--processes 2] [--rows-of FILE.npz] [--work-dir DIR]

    shuffle pass   raw npz ─ groups of 80,000 rows, permuted ─► small npz ─ buckets, permuted ─► npz of 70,000 rows
                   ─► a loader that unpacks a file while another one is trained on (candidates/katago_npz.py)
    loaderd        raw npz ─ index ─► katago_selfplay

The pass is written anew after the description in ``python shuffle.py --help`` of lightvector/KataGo, with its
defaults, and kinder: it writes no q-values and no summaries, and does not wait for files that are being written. Both
take the same window of the newest rows, by the same power law (``--min-rows`` is scaled down with the rows); the pass
takes whole files. Each run is a process of its own, and takes one epoch of that window in batches of 512. It prints
a JSON line: seconds to the first batch; rows/s from there on, and of all; bytes that it wrote to disk; the highest
memory (PSS of all processes, seen every 50 ms). ``loaderd again`` starts anew with the index that ``loaderd`` has
left behind.

The files are made once: 10,000 rows each, drawn from those of ``--rows-of`` or from games that ``examples/go`` plays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from candidates import katago_npz
from harness.interface import Config
from harness.process_tree import process_tree, pss_bytes
from real_records import arrays_of, run_example

import loaderd
from loaderd.schemas import kata

GROUP_ROWS, OUT_ROWS, RAW_ROWS, BATCH = 80_000, 70_000, 10_000, 512
SIDES = ("shuffle pass", "loaderd", "loaderd again")
Arrays = dict[str, npt.NDArray[Any]]


def main() -> None:
    args = parse_arguments()
    if args.side:
        run(args)
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    args.selfplay = write_selfplay(args)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.work_dir) as cache:
            for side in SIDES:
                runs[side].append(measure(side, args, cache))
                print(json.dumps({"side": side, **runs[side][-1]}), flush=True)
    for side, of_side in runs.items():
        middle = {key: statistics.median(one[key] for one in of_side) for key in of_side[0]}
        print(
            f"{side}: first batch after {middle['first_batch_s']:.1f} s, {middle['rows_per_s']:,.0f} rows/s behind "
            f"it, {middle['overall_rows_per_s']:,.0f} of all; {middle['written_bytes'] / 1e6:,.1f} MB written, "
            f"{middle['peak_pss_bytes'] / 2**20:,.0f} MiB"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="that there are in all")
    parser.add_argument("--min-rows", type=int, default=50_000, help="of the window")
    parser.add_argument("--window-records", type=int, default=50_000, help="that loaderd shuffles among")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows-of", type=Path, metavar="NPZ", help="whose rows to draw from")
    parser.add_argument("--work-dir", type=Path, default=Path("/var/tmp/loaderd-katago-selfplay"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--selfplay", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_selfplay(args: argparse.Namespace) -> Path:
    """The folder of the raw files: of ``args.rows`` rows."""
    folder = args.work_dir / f"selfplay-{args.rows}"
    if folder.exists():
        return Path(folder)
    if args.rows_of is None:
        made = run_example("go/make_npz.py", folder, "--games", "60", "--size", "19", "--rows", str(10**9))
        arrays = arrays_of(made / "train-000.npz")
        shutil.rmtree(made)
    else:
        arrays = arrays_of(args.rows_of)
    rng, unfinished = np.random.default_rng(0), folder.with_suffix(".unfinished")
    for number in range(args.rows // RAW_ROWS):
        rows = rng.integers(0, len(arrays["globalInputNC"]), RAW_ROWS)
        path = unfinished / f"net{number // 8}" / "tdata" / f"{rng.integers(1 << 63):016X}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **{name: arrays[name][rows] for name in kata.rows().names or ()})  # no q-values
        os.utime(path, (number, number))
    unfinished.rename(folder)
    return Path(folder)


def measure(side: str, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """A run of one side, in a process of its own."""
    options = [f"--min-rows={args.min_rows}", f"--window-records={args.window_records}"]
    options += [f"--processes={args.processes}", f"--selfplay={args.selfplay}", f"--work-dir={args.work_dir}"]
    command = [sys.executable, __file__, "--side", side, *options]
    environment = {**os.environ, "LOADERD_CACHE_DIR": cache}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        peak, over = [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                peak[0] = max(peak[0], pss_bytes(process_tree(process.pid)))

        watching = threading.Thread(target=watch)
        watching.start()
        assert process.stdout is not None
        text = process.stdout.read()
        over.set()
        watching.join()
    if process.returncode:
        sys.exit(f"{side} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(text)
    written = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    found["written_bytes"] += written if side == "loaderd" else 0
    return {**found, "peak_pss_bytes": peak[0]}


def run(args: argparse.Namespace) -> None:
    """Take an epoch, and print how long it took."""
    began_s = time.perf_counter()
    law = loaderd.PowerLaw(min_rows=args.min_rows)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        if args.side == "shuffle pass":
            batches, written = by_shuffle_pass(args, law, Path(folder))
        else:
            batches, written = by_loaderd(args, law), [0]
        rows = len(next(batches))
        first_s = time.perf_counter()
        rows_behind = sum(len(weights) for weights in batches)
        end_s = time.perf_counter()
    found = {
        "first_batch_s": first_s - began_s,
        "rows": rows + rows_behind,
        "rows_per_s": rows_behind / (end_s - first_s),
        "overall_rows_per_s": (rows + rows_behind) / (end_s - began_s),
        "written_bytes": written[0],
    }
    print(json.dumps(found))


def by_loaderd(args: argparse.Namespace, law: loaderd.PowerLaw) -> Iterator[npt.NDArray[Any]]:
    shuffle = loaderd.Shuffle(window_records=args.window_records)
    window = loaderd.katago_selfplay(args.selfplay, window=law, shuffle=shuffle)
    with loaderd.Loader(window, batch_size=BATCH, epochs=1, workers=args.processes) as loader:
        for batch in loader:
            yield batch["weight"]


def by_shuffle_pass(
    args: argparse.Namespace, law: loaderd.PowerLaw, folder: Path
) -> tuple[Iterator[npt.NDArray[Any]], list[int]]:
    """The batches, and how many bytes were written for them."""
    found = sorted(((path.stat().st_mtime, str(path)) for path in args.selfplay.rglob("*.npz")), reverse=True)
    with get_context("spawn").Pool(args.processes) as pool:
        counts = pool.map(num_rows, [path for _, path in found])
        wanted, groups, of_group, total = law(sum(counts)), [list[str]()], 0, 0
        for (_, path), rows in zip(found, counts, strict=True):
            if total >= wanted:
                break
            groups[-1].append(path)
            total, of_group = total + rows, of_group + rows
            if of_group >= GROUP_ROWS:
                groups.append([])
                of_group = 0
        buckets = max(1, round(total / OUT_ROWS))
        jobs = [(number, group, buckets, folder) for number, group in enumerate(groups) if group]
        written = sum(pool.starmap(scatter, jobs))
        written += sum(pool.starmap(merge, [(bucket, len(jobs), folder) for bucket in range(buckets)]))
    shards = tuple(str(folder / f"data{bucket}.npz") for bucket in range(buckets))
    config = Config(shards, batch_size=BATCH, epochs=1, schema=katago_npz.KATAGO)
    return (step.batch["weight"] for step in katago_npz.steps(config)), [written]


def num_rows(path: str) -> int:
    with np.load(path) as npz:
        return len(npz["globalInputNC"])


def joined(paths: Sequence[str | Path], rng: np.random.Generator) -> Arrays:
    """The rows of all files, permuted."""
    parts = [arrays_of(path) for path in paths]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = rng.permutation(len(whole["globalInputNC"]))
    return {name: values[order] for name, values in whole.items()}


def scatter(number: int, paths: Sequence[str], buckets: int, folder: Path) -> int:
    """Write each row of a group of files to one of the buckets; returns the bytes of all."""
    rng = np.random.default_rng()
    arrays = joined(paths, rng)
    of_rows = rng.integers(0, buckets, len(arrays["globalInputNC"]))
    written = 0
    for bucket in range(buckets):
        path = folder / f"bucket{bucket}-{number}.npz"
        np.savez_compressed(path, **{name: values[of_rows == bucket] for name, values in arrays.items()})
        written += path.stat().st_size
    return written


def merge(bucket: int, groups: int, folder: Path) -> int:
    """Write the file of a bucket; returns its bytes."""
    parts = [folder / f"bucket{bucket}-{number}.npz" for number in range(groups)]
    path = folder / f"data{bucket}.npz"
    np.savez_compressed(path, **joined(parts, np.random.default_rng()))
    for part in parts:
        part.unlink()
    return path.stat().st_size


if __name__ == "__main__":
    main()
