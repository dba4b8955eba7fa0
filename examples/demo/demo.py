"""What loaderd does for you, measured on this machine in about a minute.

    python demo.py --out demo

Writes shards of made-up chess positions, and reads them by two pipelines of tf.data and by loaderd
(:mod:`pipelines`); kills a worker, and a training; damages a byte; and trains a network from each pipeline. With
``--svg FILE``, what was printed is saved as a picture, too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pipelines
import tensorflow as tf
from rich.bar import Bar
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import loaderd

RECORDS = 100_000
SECONDS = 4.0  # of each pipeline
TRAINING = Path(__file__).parents[1] / "minimal" / "train_tensorflow.py"
PIPELINES = {
    "loaderd": pipelines.ours,
    "tf.data, by an expert": pipelines.expert,
    "tf.data, at first": pipelines.first,
}
COLORS = dict(zip(PIPELINES, ["green", "yellow", "red"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="What loaderd does for you, measured on this machine.")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where shards are written")
    parser.add_argument("--records", type=int, default=RECORDS, help="how many, in eight shards")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each pipeline is read")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="save what was printed as a picture")
    args = parser.parse_args()
    if args.records < 16_000:
        parser.error("--records must be at least 16000: the training would end before it can be killed")
    console = Console(width=92, record=args.svg is not None, highlight=False)
    console.clear()  # of what TensorFlow wrote while it was imported
    started_s = time.perf_counter()

    shutil.rmtree(args.out / "damaged", ignore_errors=True)
    shards = write_shards(args.out / "shards", args.records)
    size_mb = sum(path.stat().st_size for path in shards) / 1e6
    unpacked_mb = args.records * 6188 / 1e6
    cores = len(os.sched_getaffinity(0))
    console.print(
        f"{args.records:,} chess positions: {size_mb:.0f} MB on disk, {unpacked_mb:.0f} MB as floats; {cores} cores\n"
    )
    for number, (title, show) in enumerate(
        [
            ("The same shards, shuffled, in batches of 512", lambda: race(console, shards, args.seconds)),
            ("A worker is killed in the middle of an epoch", lambda: kill_a_worker(console, shards)),
            ("The training is killed, and started again", lambda: kill_the_training(console, shards, args.out)),
            ("One byte of a shard is damaged", lambda: damage_a_byte(console, shards, args.out / "damaged")),
            ("A small network is trained for an epoch", lambda: train(console, shards, args.records)),
        ],
        1,
    ):
        console.print(f"[bold]{number}. {title}[/bold]")
        show()
        console.print()
    console.print(
        f"[dim]All of it was measured just now, in {time.perf_counter() - started_s:.0f} s, one run each.[/dim]"
    )
    if args.svg is not None:
        console.save_svg(str(args.svg), title="make demo")


def say(console: Console, text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 2)))


def write_shards(folder: Path, records: int) -> list[Path]:
    """Made-up positions in the layout of ``loaderd.schemas.chess_eval``; the score of each is its material.

    Bit 24 · square + 4 · type + member says that on the square there is a piece of the type (pawn, knight, bishop,
    rook, queen, king): white's (member 0), black's (1). Members 2 and 3 say which squares it attacks: here at random.
    """
    rng = np.random.default_rng(0)
    piece = rng.choice(13, (records, 64), p=[0.65, *[0.35 / 12] * 12])  # 0: none, 1 to 6: white's, 7 to 12: black's
    bits = np.zeros((records, 64, 6, 4), bool)
    bits[..., 2:] = np.unpackbits(rng.integers(0, 256, (records, 96), np.uint8), axis=1).reshape(records, 64, 6, 2)
    for number in range(12):
        bits[..., number % 6, number // 6] = piece == number + 1
    worth = np.array([100, 300, 300, 500, 900, 0])
    score = ((bits[..., 0].sum(axis=1) - bits[..., 1].sum(axis=1)) * worth).sum(axis=1)
    flags = np.zeros((records, 16), bool)
    stored = np.concatenate([bits.reshape(records, 1536), flags], axis=1)
    return loaderd.testing.write_shards(folder, {"d": stored, "s": score}, num_shards=8)


def race(console: Console, shards: list[Path], seconds: float) -> None:
    """Read the same shards by each pipeline in turn, and compare the values of one shard."""
    rates: dict[str, float] = {}
    with Live(console=console, refresh_per_second=10) as live:
        for name, pipeline in PIPELINES.items():
            batches = iter(pipeline(shards))
            for _ in range(20):  # until its threads and processes run
                next(batches)
            records, drawn_s, start_s = 0, 0.0, time.perf_counter()
            while (elapsed_s := time.perf_counter() - start_s) < seconds:
                records += len(next(batches)[2])
                if elapsed_s > drawn_s + 0.1:
                    drawn_s, rates[name] = elapsed_s, records / elapsed_s
                    live.update(bars(rates, elapsed_s / seconds))
            rates[name] = records / elapsed_s
            live.update(bars(rates, 1.0))
            del batches
    if not console.is_terminal:
        console.print()
    expected = in_file_order(pipelines.first, shards[0])
    for name, pipeline in PIPELINES.items():
        found = in_file_order(pipeline, shards[0])
        same = all(np.array_equal(a, b) for a, b in zip(expected[:2], found[:2], strict=True))
        if not (same and np.allclose(expected[2], found[2], rtol=0, atol=1e-6)):
            sys.exit(f"{name} gives other values than tf.data, at first.")
    say(console, f"the same values from all three: {len(expected[2]):,} records of {shards[0].name} compared")


def bars(rates: dict[str, float], done: float) -> Table:
    """A bar for each pipeline, as long as its rate; that of the last one is ``done`` of the way."""
    fastest = max(rates.values())
    table = Table.grid(padding=(0, 1))
    for name, rate in rates.items():
        length = rate * (done if name == list(rates)[-1] else 1.0)
        factor = "" if rate == fastest else f"{fastest / rate:.1f} times slower"
        bar = Bar(fastest, 0, length, width=26, color=COLORS[name])
        table.add_row(f"  {name:22}", bar, f"{rate:>9,.0f} records/s", f"{factor:18}")
    return table


def in_file_order(pipeline: Callable[..., tf.data.Dataset], shard: Path) -> list[np.ndarray]:
    """Board, flags and score of all records of a shard."""
    batches = list(pipeline([shard], shuffle=False, epochs=1).as_numpy_iterator())
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def kill_a_worker(console: Console, shards: list[Path]) -> None:
    undisturbed, _ = read_epoch(shards, kills=False)
    killed, (late_s, pid, batch) = read_epoch(shards, kills=True)
    if undisturbed != killed:
        sys.exit("The batches differ from those of an undisturbed epoch.")
    say(
        console,
        f"process {pid} got SIGKILL behind batch {batch}; the longest wait after it: {1000 * late_s:.0f} ms",
    )
    say(console, f"the bytes of the epoch, undisturbed: [green]{undisturbed}[/green]")
    say(console, f"the bytes of the epoch, killed:      [green]{killed}[/green]")


def read_epoch(shards: list[Path], kills: bool) -> tuple[str, tuple[float, int, int]]:
    """The digest of an epoch's batches; of a kill: the longest wait after it, the pid, behind which batch."""
    digest, waits, pid = hashlib.sha256(), [0.0], 0
    with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=512, workers=2) as loader:
        batches, kill_at = iter(loader), len(loader) // 4 if kills else None
        for number in range(len(loader)):
            asked_s = time.perf_counter()
            batch = next(batches)
            if pid:
                waits.append(time.perf_counter() - asked_s)
            for field in sorted(batch):
                digest.update(np.ascontiguousarray(batch[field]))
            if number == kill_at:
                pid = worker_of(os.getpid())
                os.kill(pid, signal.SIGKILL)
    return digest.hexdigest()[:16], (max(waits), pid, kill_at or 0)


def worker_of(ancestor: int) -> int:
    """The pid of a worker process of a loader of the process ``ancestor``."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == "loaderd-worker" and ancestor in ancestors_of(process):
                return int(process.name)
        except OSError:  # it has ended
            continue
    sys.exit("no worker of the loader was found in /proc")


def ancestors_of(process: Path) -> Iterator[int]:
    parent = int(process.name)
    while parent > 1:
        parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        yield parent


def kill_the_training(console: Console, shards: list[Path], out: Path) -> None:
    """Run a training of two epochs undisturbed; and again, killed in the middle, and started once more."""
    undisturbed, killed = (out / name for name in ("undisturbed", "killed"))
    for folder in (undisturbed, killed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    whole, victim = start_training(shards, undisturbed), start_training(shards, killed)
    while not (killed / "ckpt-3.index").exists() and victim.poll() is None:
        time.sleep(0.02)
    victim.kill()
    if victim.wait() == 0:
        sys.exit("The training ended before it could be killed.")
    step = steps_of(killed)
    again = start_training(shards, killed)
    printed = again.communicate()[0], whole.communicate()[0]
    if again.returncode or whole.returncode or victim.returncode != -signal.SIGKILL:
        sys.exit(f"A training ended in another way than it should:\n{printed[again.returncode == 0]}")
    digests = [digest_of_checkpoint(folder) for folder in (undisturbed, killed)]
    if digests[0] != digests[1]:
        sys.exit("The weights differ from those of the undisturbed training.")
    say(
        console,
        f"it got SIGKILL; started again, it went on from its checkpoint, step {step} of {steps_of(killed)}",
    )
    say(console, f"weights and Adam's state, undisturbed: [green]{digests[0]}[/green]")
    say(console, f"weights and Adam's state, killed:      [green]{digests[1]}[/green]")


def steps_of(folder: Path) -> int:
    """The steps that the last checkpoint was made behind."""
    reader = tf.train.load_checkpoint(str(folder))
    (name,) = (each for each in reader.get_variable_to_shape_map() if "optimizer/_iterations" in each)
    return int(reader.get_tensor(name))


def start_training(shards: list[Path], folder: Path) -> subprocess.Popen[str]:
    pattern = str(shards[0].parent / "*.tfrecord")
    command = [sys.executable, str(TRAINING), pattern, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def digest_of_checkpoint(folder: Path) -> str:
    """The digest of all that the last checkpoint holds: weights, the optimizer's state, the position."""
    reader = tf.train.load_checkpoint(str(folder))
    digest = hashlib.sha256()
    for name in sorted(reader.get_variable_to_shape_map()):
        digest.update(name.encode() + np.asarray(reader.get_tensor(name)).tobytes())
    return digest.hexdigest()[:16]


def damage_a_byte(console: Console, shards: list[Path], folder: Path) -> None:
    """Read a copy of a shard in which a byte was flipped: as an error, and skipped."""
    folder.mkdir()
    shard = Path(shutil.copy(shards[3], folder))
    offset = loaderd.testing.damage(shard, record=1234)
    schema = loaderd.schemas.chess_eval()
    try:
        with loaderd.Loader(shard, schema, batch_size=512) as loader:
            count(loader)
        sys.exit("The damage was not found.")
    except loaderd.errors.CorruptRecordError as error:
        say(console, f"byte {offset:,} was flipped. loaderd stops, with")
        say(console, f"[red]{type(error).__name__}[/red]: {escape(str(error))}")
    with loaderd.Loader(shard, schema, batch_size=512, on_corrupt="skip_record") as loader:
        records = count(loader)
    say(console, f'with on_corrupt="skip_record": {records:,} records come, all but that one')


def count(loader: loaderd.Loader) -> int:
    return sum(len(batch["score"]) for batch in loader)


def train(console: Console, shards: list[Path], records: int) -> None:
    """Train a small network on as many records as an epoch has: how long do its steps wait for their batches?"""
    table = Table.grid(padding=(0, 2))
    for name, pipeline in PIPELINES.items():
        step = training_step()
        batches = iter(pipeline(shards))
        for _ in range(20):  # the step is compiled; threads and processes run
            step(*next(batches))
        done, waited_s, start_s = 0, 0.0, time.perf_counter()
        while done < records:
            asked_s = time.perf_counter()
            board, flags, score = next(batches)
            waited_s += time.perf_counter() - asked_s
            loss = float(step(board, flags, score))
            done += len(score)
        elapsed_s = time.perf_counter() - start_s
        del batches
        table.add_row(
            f"  {name}", f"{elapsed_s:5.1f} s", f"{waited_s / elapsed_s:4.0%} of it waiting", f"loss {loss:.3f}"
        )
    console.print(table)


def training_step() -> Callable[..., tf.Tensor]:
    """A step of a new network of one hidden layer."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1, "tanh")])
    net.build((None, 1536))
    optimizer = keras.optimizers.Adam()
    optimizer.build(net.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(board: tf.Tensor, flags: tf.Tensor, score: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            judged = net(tf.reshape(board, [-1, 1536]))[:, 0]
            loss = tf.reduce_mean((judged - score) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
        return loss

    return step


if __name__ == "__main__":
    main()
