"""What a position says of its data."""

from __future__ import annotations

import numpy as np

import loaderd
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.formats.shard_index import ShardIndex, shrunk
from loaderd.options import StreamOptions
from loaderd.storage.shard_file import ShardFile


def test_each_set_has_a_name_of_its_own(numbered_schema: loaderd.Schema):
    columns = (np.array([number], dtype=np.int64) for number in (0, 90, 9, 0, 0))
    index = ShardIndex(ShardFile("a", 0, 0), "none", 0, (), *map(shrunk, columns))
    options = StreamOptions(batch_size=1, workers=1)
    a = loaderd.Dataset("a", numbered_schema)
    mix = loaderd.Mix({" a": 0.5, "a": 0.5}, {" a": a, "a": a})
    names = [
        list(LocalData(of, options, [[index.file]] * len(of.leaves()), lambda _: index).of)
        for of in (a, mix, loaderd.Concat([mix, a]))
    ]
    assert names[0] == ["shards"]
    assert names[1] == ["weights", " a shards", "a shards"]
    assert names[2] == ["0 weights", "0. a shards", "0.a shards", "1 shards"]
