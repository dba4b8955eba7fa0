"""Makes the pictures of docs/waiting.md from real runs: `loaderd top` of two trainings, and a board by `inspect`.

::

    python examples/chess/make_shards.py --out shards --positions 12000
    python docs/images/make.py shards

One of the two has a field whose function waits, so that it waits for data.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path

from loaderd.cli.top import screen
from loaderd.observe.running_streams import running_streams
from loaderd.observe.top_rows import Row, row_of
from rich.console import Console
from rich.text import Text

_FOLDER = Path(__file__).parent
_TRAINING = """
import sys, time, loaderd
chess = loaderd.schemas.chess_eval()
def looked_up(stored):
    time.sleep(len(stored) * 6e-5)
    return stored * 1.0
more = {"looked_up": loaderd.Derived(looked_up, "stored", (), "float32")} if "slow" in sys.argv else {}
schema = loaderd.Schema(chess.features, {**chess.fields, **more}, chess.intermediates)
with loaderd.Loader(sys.argv[1], schema, batch_size=128, epochs=None, workers=1) as loader:
    for _ in loader:
        time.sleep(0.004)
"""
_SECONDS = 6
_WIDTH = 135


def save(console: Console, name: str, title: str) -> None:
    """What the console shows, as an SVG."""
    console.save_svg(str(_FOLDER / name), title=title)


def new_console(width: int) -> Console:
    """One that shows nothing here."""
    return Console(
        record=True,
        width=width,
        file=io.StringIO(),
        color_system="truecolor",
        force_terminal=True,
    )


def draw_top(shards: str) -> None:
    """`loaderd top`, when both trainings have run for some seconds."""
    trainings = [
        subprocess.Popen(
            [sys.executable, "-c", _TRAINING, f"{shards}/*.tfrecord", how]
        )
        for how in ("plain", "slow")
    ]
    try:
        pids = frozenset(one.pid for one in trainings)
        rows: list[Row] = []
        while len(rows) < len(trainings) or not all(
            row.steps_per_s for row in rows
        ):
            assert all(one.poll() is None for one in trainings), (
                "a training has ended"
            )
            time.sleep(_SECONDS)
            found, now_s = running_streams(pids), time.monotonic()
            sampled = [(one, one.watched.samples()) for one in found]
            rows = [
                row_of(one.consumer, "", samples, one.watched.facts, now_s)
                for one, samples in sampled
                if samples
            ]
        console = new_console(_WIDTH)
        console.print(screen(rows, _WIDTH))
        save(console, "top.svg", "loaderd top")
    finally:
        for training in trainings:
            training.kill()
            training.wait()


def draw_board(shards: str) -> None:
    """The first planes of a record, as `loaderd inspect` prints them."""
    shard = min(Path(shards).glob("*.tfrecord"))
    program = "from loaderd.cli.main import main; main()"
    command = [
        "inspect",
        str(shard),
        "--schema",
        "loaderd.schemas:chess_eval",
        "--record",
        "30",
    ]
    run = [sys.executable, "-c", program, *command]
    printed = subprocess.run(
        run, capture_output=True, text=True, check=True
    ).stdout.replace(f"{shard.parent}/", "")
    lines = [
        line for line in printed.splitlines() if not line.startswith("  d:")
    ]
    console = new_console(112)
    console.print(Text("\n".join(lines[:23])), no_wrap=True)
    save(
        console,
        "board.svg",
        " ".join(["loaderd", command[0], shard.name, *command[2:]]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shards", help="a folder")
    arguments = parser.parse_args()
    draw_board(arguments.shards)
    draw_top(arguments.shards)


if __name__ == "__main__":
    main()
