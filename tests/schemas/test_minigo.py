"""Shards as minigo writes them, against what its own parser makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

import loaderd


def test_shards_are_read_as_minigo_reads_them(tmp_path: Path):
    rng = np.random.default_rng(0)
    boards = rng.integers(0, 2, (50, 19, 19, 17)).astype(np.uint8)
    policies = rng.random((50, 362), np.float32)
    outcomes = rng.choice(np.array([-1.0, 1.0], np.float32), 50)
    path = tmp_path / "a.tfrecord.zz"
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions("ZLIB")) as writer:
        for board, policy, outcome in zip(boards, policies, outcomes, strict=True):
            stored = {
                "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[board.tobytes()])),
                "pi": tf.train.Feature(bytes_list=tf.train.BytesList(value=[policy.tobytes()])),
                "outcome": tf.train.Feature(float_list=tf.train.FloatList(value=[outcome])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=stored)).SerializeToString())
    with loaderd.Loader(path, loaderd.schemas.minigo(), batch_size=50, shuffle=False, index_cache="none") as loader:
        (batch,) = [{name: values.copy() for name, values in batch.items()} for batch in loader]
    assert (batch["planes"] == boards.astype(np.float32)).all() and batch["planes"].dtype == np.float32
    assert (batch["policy"] == policies).all()
    assert (batch["outcome"] == outcomes).all()
