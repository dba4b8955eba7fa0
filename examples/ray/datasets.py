"""What the servers of the examples have: the shards that ``make demo`` trains on, too."""

from pathlib import Path

import loaderd

SHARDS = Path(__file__).resolve().parents[2] / "demo" / "shards"

train = loaderd.Dataset(str(SHARDS / "train-*.tfrecord"), loaderd.schemas.chess_eval())
