"""Validates the checkpoints of ``train.py`` as they appear, on the CPU, while the training goes on.

    python train.py --data shards --out run
    python validate.py --data shards --run run      # at the same time, in another terminal

Each of the two processes has a loader of its own, so neither waits for the other. All checkpoints are validated on
the same positions in the same order: that of the files.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from pathlib import Path

from train import CHECKPOINTS, DONE, build_model, choose_device, compile_model, open_validation

LOOK_EVERY_S = 0.2


def main() -> None:
    args = parse_arguments()
    choose_device("cpu")  # first, or TensorFlow would take memory of the GPU that train.py uses
    validation = open_validation(args.data, args.batch_size, device=None)
    model = build_model()
    compile_model(model)
    # Validation needs no optimizer.
    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
    checkpoints, results = args.run / CHECKPOINTS, args.run / "validation.csv"
    last = last_step(results)
    print(f"waiting for checkpoints in {checkpoints}", flush=True)
    while True:
        done = (checkpoints / DONE).exists()  # before glob: if it is there, the newest checkpoint is the last
        path = max(checkpoints.glob("step-*.weights.h5"), default=None)
        if path is not None and step_of(path) != last:
            last = step_of(path)
            model.load_weights(path)
            val_loss = model.evaluate(validation, verbose=0)
            print(f"step {last}: val_loss {val_loss:.4f}", flush=True)
            append(results, last, val_loss)
        elif done:
            break
        else:
            time.sleep(LOOK_EVERY_S)
    print(f"train.py has ended: {results}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Validate the checkpoints of train.py as they appear, on the CPU, until the training ends.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder with the shards")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the --out of train.py")
    parser.add_argument("--batch-size", type=int, default=512, help="positions at a time")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error("--batch-size must be positive")
    return args


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".weights.h5"))


def last_step(results: Path) -> int | None:
    """The last step that an earlier call of this command has validated, if any."""
    if not results.exists():
        return None
    with results.open(newline="") as file:
        return max((int(row["step"]) for row in csv.DictReader(file)), default=None)


def append(results: Path, step: int, val_loss: float) -> None:
    with results.open("a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(["step", "val_loss"])
        writer.writerow([step, val_loss])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped")
