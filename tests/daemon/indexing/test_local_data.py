"""What a position says of its data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import loaderd
from loaderd.daemon.indexing.local_data import LocalData, files_with, of_listing
from loaderd.dataset import joined_text
from loaderd.formats.shard_index import ShardIndex, shrunk
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing
from loaderd.storage.shard_file import ShardFile

OPTIONS = StreamOptions(batch_size=1, workers=1)


def index_of(file: ShardFile) -> ShardIndex:
    """Of nine records."""
    columns = (np.array([number], dtype=np.int64) for number in (0, 90, 9, 0, 0))
    return ShardIndex(file, "none", 0, (), *map(shrunk, columns))


def test_each_set_has_a_name_of_its_own(numbered_schema: loaderd.Schema):
    file = ShardFile("a", 0, 0)
    a = loaderd.Dataset("a", numbered_schema)
    mix = loaderd.Mix({" a": 0.5, "a": 0.5}, {" a": a, "a": a})
    names = [
        list(LocalData(of, OPTIONS, [[file]] * len(of.leaves()), {None: {file: index_of(file)}}).of)
        for of in (a, mix, loaderd.Concat([mix, a]))
    ]
    assert names[0] == ["shards"]
    assert names[1] == ["weights", " a shards", "a shards"]
    assert names[2] == ["0 weights", "0. a shards", "0.a shards", "1 shards"]


def test_the_weights_of_a_mix_in_another_set_belong_to_a_position(numbered_schema: loaderd.Schema):
    a = loaderd.Dataset("a", numbered_schema)

    def weights(share: float) -> str:
        mix = loaderd.Mix({"a": share, "b": 1 - share}, {"a": a, "b": a})
        return joined_text(loaderd.Concat([mix, a]))["0 weights"]

    assert weights(0.5) == weights(0.5) != weights(0.25)


def test_shards_of_several_folders_are_told_apart_by_them(numbered_schema: loaderd.Schema):
    files = [ShardFile(f"/data/{folder}/0.tfrecord", 0, 0) for folder in ("a", "b", "c")]
    grows = loaderd.Dataset("a", numbered_schema, refresh="epoch")

    def listing(*files: ShardFile) -> Listing | None:
        return LocalData(grows, OPTIONS, [files], {None: {file: index_of(file) for file in files}}).listing

    (every,), (first,) = listing(*files) or (), listing(*files[:2]) or ()
    assert every and every[:3] == ("a/0.tfrecord", "c/0.tfrecord", 3)
    assert first and first[:3] == ("a/0.tfrecord", "b/0.tfrecord", 2)


def test_shards_are_indexed_in_the_order_of_their_paths_whatever_that_of_the_set_is(numbered_schema: loaderd.Schema):
    files = [ShardFile(f"/data/{folder}/{number}", 0, -number) for folder in "ab" for number in range(3)]
    by_time = loaderd.Dataset("a", numbered_schema, order="time")
    sets = of_listing(by_time, [files], None)
    assert [file.uri[6:] for file in sets[0]] == ["a/2", "b/2", "a/1", "b/1", "a/0", "b/0"]
    both = loaderd.Concat([by_time, replace(by_time, order="path")])
    assert files_with(None, by_time, sets) == files_with(None, both, [*sets, files]) == files
