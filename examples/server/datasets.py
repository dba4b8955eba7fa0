"""The data sets of a server: ``loaderd serve datasets:train datasets:validation``.

The server imports this module, and consumers choose a data set by its name. The shards are in the folder that the
environment variable ``SHARDS`` names, by default ``shards``. Replace this module with one of your own.
"""

import os

import loaderd

SHARDS = os.environ.get("SHARDS", "shards")

schema = loaderd.schemas.chess_eval()
train = loaderd.Dataset(f"{SHARDS}/train-*.tfrecord", schema)
validation = loaderd.Dataset(f"{SHARDS}/validation-*.tfrecord", schema, shuffle=False)
