"""Data whose batches take longer to make than any test takes."""

import time

import datasets

import loaderd


def wait(ids):
    time.sleep(600)
    return ids


_schema = loaderd.Schema(
    features={"n": loaderd.Int64()},
    fields={"id": loaderd.Derived(wait, "n", (), "int64")},
    intermediates={"n": loaderd.Array("n")},
)
train = loaderd.Dataset(datasets.train.shards, _schema)
