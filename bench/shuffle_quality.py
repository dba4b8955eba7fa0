"""How well is an epoch shuffled? The orders of loaderd, of tf.data and of chance, measured alike.

::

    python bench/shuffle_quality.py [--records 2000000] [--epochs 4] [--reading] [--figure docs/images/shuffle.svg]

A record is its number, counted through all shards; an **order** is the numbers as they are delivered in one epoch,
int64, (records,). loaderd's order is arithmetic, so its own plan gives it here without a file. Before that, real
shards are read through ``loaderd.Loader``, and what comes out is compared with what was computed. The order of
tf.data is what tf.data delivers, of numbers in place of records. A **game** is a run of 80 consecutive records:
positions that resemble each other. ``--figure`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness.hardware import describe_machine
from harness.process_tree import cpu_s, process_tree
from harness.synthetic import cached_shards, write_shards

import loaderd
from loaderd import Shuffle
from loaderd.options import StreamOptions
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.shm.layout import WindowLayout

BATCH, GAME, SHARDS, CYCLE_LENGTH = 512, 80, 64, 16
SCHEMA = loaderd.schemas.chess_eval()

# What shuffles: chance, loaderd, or tf.data with a shuffle buffer of so many records.
CASES: dict[str, Shuffle | int | None] = {
    "chance (perfect)": None,
    "loaderd, defaults": Shuffle(),
    "loaderd, blocks of 256": Shuffle(block_records=256),
    "loaderd, blocks of 64": Shuffle(block_records=64),
    "loaderd, window 16,384": Shuffle(16_384),
    "loaderd, window 16,384, blocks of 64": Shuffle(16_384, 64),
    "tf.data, buffer 10,000": 10_000,
    "tf.data, buffer 262,144": 262_144,
}
DRAWN = ("chance (perfect)", "loaderd, defaults", "loaderd, window 16,384", "tf.data, buffer 10,000")

Int64s = npt.NDArray[np.int64]
Orders = list[Int64s]  # of consecutive epochs, from the first on


def split(num_records: int, num_shards: int) -> list[int]:
    """The records of each shard, as ``synthetic.write_shards`` divides them."""
    ends = [num_records * end // num_shards for end in range(num_shards + 1)]
    return [end - start for start, end in pairwise(ends)]


def orders_of(case: Shuffle | int | None, shards: Sequence[int], epochs: int) -> Orders:
    """The orders that a case of ``CASES`` gives for shards of so many records."""
    if case is None:
        rng = np.random.default_rng(0)
        return [rng.permutation(sum(shards)) for _ in range(epochs)]
    return loaderd_orders(shards, case, epochs) if isinstance(case, Shuffle) else tfdata_orders(shards, case, epochs)


def share_of(shards: Sequence[int], shuffle: Shuffle) -> HostShare:
    """The windows of an epoch that one host reads alone."""
    window_records = StreamOptions(BATCH, shuffle=shuffle).window_records(SCHEMA.row_bytes)
    return HostShare(EpochRemainder(sum(shards)), 0, 1, window_records)


def loaderd_orders(shards: Sequence[int], shuffle: Shuffle, epochs: int, seed: int = 0) -> Orders:
    """What loaderd's own plan gives for plain shards."""
    ends = np.cumsum(shards)
    in_shards = zip(ends - shards, ends, strict=True)  # no block reaches from one shard into the next
    firsts = np.concatenate([np.arange(start, end, shuffle.block_records) for start, end in in_shards])
    share = share_of(shards, shuffle)
    rows = DatasetRows(np.diff(firsts, append=ends[-1]), seed, True)
    plan = PassPlan(rows, BatchPlan(share, BATCH, "short", epochs), seed, True, 0)
    orders = [np.empty(share.size, np.int64) for _ in range(epochs)]
    for window in range(epochs * share.num_windows):
        epoch, index = divmod(window, share.num_windows)
        rows = [np.arange(part.first, part.stop) + firsts[part.block] for part in plan.slices_of(window)]
        orders[epoch][share.begin_of(index) + plan.order_of(window).places()] = np.concatenate(rows)
    return orders


def delivered_orders(num_records: int, num_shards: int, shuffle: Shuffle, epochs: int, seed: int = 0) -> Orders:
    """What ``loaderd.Loader`` delivers of real shards, whose records begin with their number."""
    schema = loaderd.Schema(SCHEMA.features, {"packed": loaderd.Packed("d")})
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(path) for path in write_shards(folder, num_records, num_shards=num_shards)]
        with loaderd.Loader(
            paths, schema, batch_size=BATCH, shuffle=shuffle, seed=seed, index_cache="none", progress=False
        ) as loader:
            return [
                np.concatenate([batch["packed"][:, :4].copy().view(">u4")[:, 0] for batch in loader]).astype(np.int64)
                for _ in range(epochs)
            ]


def tfdata_orders(shards: Sequence[int], buffer: int, epochs: int) -> Orders:
    """What tf.data makes of the usual recipe: files shuffled, 16 of them read in turn, a shuffle buffer behind."""
    import tensorflow as tf  # here, because it takes seconds and the other orders do without

    tf.random.set_seed(0)
    ends = np.cumsum(shards)
    files = tf.data.Dataset.from_tensor_slices((ends - shards, ends)).shuffle(len(shards))
    records = files.interleave(tf.data.Dataset.range, cycle_length=CYCLE_LENGTH).shuffle(buffer)
    return [np.concatenate(list(records.batch(4096).as_numpy_iterator())) for _ in range(epochs)]


def games_in_a_batch(order: Int64s) -> float:
    """Different games in a batch of 512, on average."""
    games = np.sort(_whole_batches(order) // GAME, axis=1)
    return float(1 + (np.diff(games, axis=1) != 0).sum(axis=1).mean())


def stray_of_a_batch(order: Int64s) -> float:
    """How far a batch's mean place in the files is from the whole set's (root mean square), by chance 1.0."""
    numbers = np.arange(len(order))
    distances = _whole_batches(order).mean(axis=1) - numbers.mean()
    return float(np.sqrt(np.mean(distances**2)) / (numbers.std() / BATCH**0.5))


def meeting_again(order: Int64s, later: Int64s) -> float:
    """Pairs that share a batch in both epochs, by chance 1.0."""
    first, second = _places(order) // BATCH, _places(later) // BATCH
    all_pairs = len(order) * (len(order) - 1) / 2
    return _pairs(first * (second.max() + 1) + second) * all_pairs / (_pairs(first) * _pairs(second))


def span_of_a_game(order: Int64s) -> float:
    """The part of the epoch between the first and the last record of a game, on average; by chance 79/81."""
    places = _places(order)
    return float(np.ptp(places[: len(places) // GAME * GAME].reshape(-1, GAME), axis=1).mean() / len(places))


def _whole_batches(order: Int64s) -> Int64s:
    return order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)


def _places(order: Int64s) -> Int64s:
    """At which place of the epoch each record is delivered."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _pairs(groups: Int64s) -> float:
    """How many pairs of records are in the same group."""
    counts = np.unique(groups, return_counts=True)[1].astype(float)
    return float((counts * (counts - 1) / 2).sum())


def reading_costs(num_records: int = 600_000, rounds: int = 4) -> dict[str, float]:
    """CPU time of all processes for a record that is read, shuffled and unpacked, in µs: the least of some epochs."""
    paths = [str(path) for path in cached_shards(Path.home() / ".cache" / "loaderd-bench", num_records)]
    shuffles = {name: case for name, case in CASES.items() if isinstance(case, Shuffle)}
    costs = dict.fromkeys(shuffles, float("inf"))
    for name, shuffle in [*shuffles.items()] * rounds:
        with loaderd.Loader(paths, SCHEMA, batch_size=BATCH, shuffle=shuffle, workers=2, progress=False) as loader:
            for _ in range(2):
                began_s = cpu_s(process_tree(os.getpid()))
                records = sum(len(batch["score"]) for batch in loader)
                costs[name] = min(costs[name], (cpu_s(process_tree(os.getpid())) - began_s) / records * 1e6)
    return costs


def table_row(name: str, orders: Orders, shards: Sequence[int], costs: dict[str, float]) -> str:
    """A line of the table; a measure is the mean over the epochs."""
    games, stray = (np.mean([measure(order) for order in orders]) for measure in (games_in_a_batch, stray_of_a_batch))
    again = np.mean([meeting_again(*pair) for pair in pairwise(orders)])
    memory, case = "", CASES[name]
    if isinstance(case, Shuffle):
        layout = WindowLayout(SCHEMA.row_bytes, share_of(shards, case).largest_window)
        memory = f"{2 * layout.arena_bytes / 1e6:.0f} MB"
    cost = f"{costs[name]:.2f}" if name in costs else ""
    return f"| {name} | {games:.0f} | {stray:.2f} | {again:.2f} | {memory} | {cost} |\n"


def draw(path: Path, drawn: dict[str, Int64s], points: int = 4000, games: int = 20) -> None:
    """Above: where the records of an epoch come from. Below: when those of some games come."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shuffle"  # or the same picture would be another file each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(drawn), figsize=(12, 6.6), sharex=True, sharey="row", layout="constrained")
    for (name, order), (above, below) in zip(drawn.items(), axes.T, strict=True):
        places, total = _places(order), len(order)
        some = np.random.default_rng(0).choice(total, min(points, total), replace=False)
        above.scatter(places[some] / total, some / total, s=2, color="#0072B2", linewidths=0, rasterized=True)
        above.set_title(f"{name}\n{games_in_a_batch(order):.0f} games in a batch of {BATCH}", fontsize=11)
        first = np.linspace(0, total // GAME - 1, games).astype(int) * GAME
        x = places[first[:, None] + np.arange(GAME)] / total
        y = np.broadcast_to(np.arange(1, games + 1)[:, None], x.shape)
        below.scatter(x, y, s=5, color="#D55E00", linewidths=0, rasterized=True)
        below.set_title(f"a game spans {span_of_a_game(order):.0%} of the epoch", fontsize=11)
        below.set_xlabel("place in the epoch")
    axes[0, 0].set_ylabel("place in the files")
    axes[1, 0].set_ylabel(f"{games} games of {GAME} positions")
    axes[1, 0].set_yticks([1, games // 2, games])
    by_chance, ours, _, theirs = (games_in_a_batch(order) for order in drawn.values())
    title = f"loaderd mixes {ours:.0f} games into a batch of {BATCH}, the usual tf.data recipe {theirs:.0f}"
    figure.suptitle(f"{title}, a perfect shuffle {by_chance:.0f}", fontsize=14)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure how well loaderd and tf.data shuffle.")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--reading", action="store_true", help="also measure epochs of 600,000 real records")
    parser.add_argument("--figure", type=Path, help="draw it here (.svg or .png)")
    options = parser.parse_args(arguments)
    for shuffle in (Shuffle(), Shuffle(16_384), Shuffle(4096, 64)):
        if not np.array_equal(delivered_orders(50_011, 3, shuffle, 2), loaderd_orders(split(50_011, 3), shuffle, 2)):
            sys.exit(f"{shuffle}: loaderd delivers another order than its plan gives")
    shards, drawn = split(options.records, SHARDS), {}
    costs = reading_costs() if options.reading else {}
    sys.stdout.write(f"| order | games in a batch of {BATCH} | stray of a batch | pairs that meet again ")
    sys.stdout.write("| memory of windows | CPU µs a record |\n|---|---|---|---|---|---|\n")
    for name, case in CASES.items():
        orders = orders_of(case, shards, options.epochs)
        sys.stdout.write(table_row(name, orders, shards, costs))
        if name in DRAWN:
            drawn[name] = orders[0]
    if options.figure:
        draw(options.figure, drawn)
    import tensorflow as tf

    versions = f"numpy {np.__version__}, TensorFlow {tf.__version__}"
    command = shlex.join(["python", "bench/shuffle_quality.py", *arguments])
    sys.stdout.write(f"\n{datetime.now(timezone.utc):%Y-%m-%d}; {describe_machine()}; {versions}; `{command}`\n")


if __name__ == "__main__":
    main(sys.argv[1:])
