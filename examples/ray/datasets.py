"""The data set that the servers of the Ray examples serve: the shards that ``make demo-chess`` trains on."""

from pathlib import Path

import loaderd

SHARDS = Path(__file__).resolve().parents[2] / "demo" / "shards"

train = loaderd.Dataset(str(SHARDS / "train-*.tfrecord"), loaderd.schemas.chess_eval())
