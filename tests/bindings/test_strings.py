"""Text of a limited length, as the ids of records are: stored with zeros behind it, delivered without them."""

from __future__ import annotations

from pathlib import Path

import loaderd_tf
import numpy as np
import tensorflow as tf

import loaderd
from loaderd.errors import RecordMismatchError

IDS = [b"a", b"game-00000000016", b"", "Zug «é»".encode(), b"with\0inside", *(b"%d" % number for number in range(40))]


def write(path: Path, ids: list[bytes]) -> str:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for each in ids:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[each]))
            example = tf.train.Example(features=tf.train.Features(feature={"id": feature}))
            writer.write(example.SerializeToString())
    return str(path)


def test_ids_arrive_as_text(tmp_path: Path):
    path = write(tmp_path / "a.tfrecord", [each.ljust(16, b"\0") for each in IDS])
    schema = loaderd.Schema({"id": loaderd.Raw("S16")}, {"id": loaderd.Array("id")})
    with loaderd.Loader(path, schema, batch_size=10, shuffle=False, workers=1) as loader:
        assert [each for batch in loader for each in batch["id"].tolist()] == IDS
    dataset = loaderd_tf.make_dataset(path, schema, batch_size=10, shuffle=False, workers=1, structure="id")
    assert dataset.element_spec == tf.TensorSpec([None], tf.string)
    kept = list(dataset)
    assert np.concatenate([ids.numpy() for ids in kept]).tolist() == IDS
    upper = [each for ids in dataset.map(tf.strings.upper) for each in ids.numpy()]
    assert sorted(upper) == sorted(each.upper() for each in IDS)
    dataset.close()


def test_text_of_another_length_is_an_error(tmp_path: Path):
    path = write(tmp_path / "a.tfrecord", [b"sixteen bytes it", b"not sixteen"])
    schema = loaderd.Schema({"id": loaderd.Raw("S16")}, {"id": loaderd.Array("id")})
    try:
        with loaderd.Loader(path, schema, batch_size=2, workers=1) as loader:
            list(loader)
    except RecordMismatchError as error:
        assert "record 1" in str(error) and "16" in str(error) and "11" in str(error)
    else:
        raise AssertionError("it was read")
