"""The data set of the programs, and of the server that some of them connect to."""

import os

import loaderd

schema = loaderd.Schema(features={"n": loaderd.Int64()}, fields={"id": loaderd.Array("n")})
train = loaderd.Dataset(os.environ["SHARDS"], schema, loaderd.Shuffle(window_records=200, block_records=16))
