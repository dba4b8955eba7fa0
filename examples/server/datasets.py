"""What the server of this folder serves: ``loaderd serve datasets:train datasets:validation``.

A module of your own: no more than names that are data sets. The server imports it; consumers name what is in it.
"""

import os

import loaderd

SHARDS = os.environ.get("SHARDS", "shards")

schema = loaderd.schemas.chess_eval()
train = loaderd.Dataset(f"{SHARDS}/train-*.tfrecord", schema)
validation = loaderd.Dataset(f"{SHARDS}/validation-*.tfrecord", schema, shuffle=False)
