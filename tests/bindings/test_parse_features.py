"""A schema made of what ``tf.io.parse_example`` takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.cli.main import main
from loaderd.errors import OptionError, SchemaError


def test_a_schema_from_what_parse_example_takes(tmp_path: Path):
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for n in range(10):
            features = {
                "d": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([n, 255 - n])])),
                "i": tf.train.Feature(int64_list=tf.train.Int64List(value=[n, -n])),
                "f": tf.train.Feature(float_list=tf.train.FloatList(value=[n / 3])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    features = {
        "d": tf.io.FixedLenFeature([], tf.string),
        "i": tf.io.FixedLenFeature([2], tf.int64),
        "f": tf.io.FixedLenFeature([], tf.float32),
        "missing": tf.io.FixedLenFeature([3], tf.float32, default_value=[1.0, 2.0, 3.0]),
    }
    schema = loaderd_tf.schema_from_features(features, bytes_features={"d": loaderd.PackedBits(16)})
    (batch,) = loaderd_tf.make_dataset(path, schema, batch_size=10, shuffle=False, workers=1)
    parsed = next(iter(tf.data.TFRecordDataset(path).batch(10).map(lambda r: tf.io.parse_example(r, features))))
    for name in ("i", "f", "missing"):
        assert np.array_equal(batch[name], parsed[name]) and batch[name].dtype == parsed[name].dtype
    bits = np.unpackbits(tf.io.decode_raw(parsed["d"], tf.uint8).numpy(), axis=1)
    assert np.array_equal(batch["d"], bits) and batch["d"].dtype == tf.float32


def test_inspect_proposes_the_same_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    random, count = np.random.default_rng(0), 50
    stored = {"board": loaderd.PackedBits(1536), "hash": loaderd.PackedBits(16), "moves": loaderd.Raw("int16", (30,))}
    arrays = {
        "board": random.random((count, 1536)) < 0.5,
        "hash": random.random((count, 16)) < 0.5,
        "moves": random.integers(-999, 999, (count, 30)).astype("int16"),
        "policy": random.random((count, 361), np.float32),
        "score": np.arange(count),
    }
    loaderd.testing.write_shards(tmp_path, arrays)
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "*.tfrecord"), "--features"])
    proposed: dict[str, Any] = {}
    exec(compile(capsys.readouterr().out, "records.py", "exec"), proposed)
    features = {name: string() for name in stored} | {
        "policy": tf.io.FixedLenFeature([361], tf.float32),
        "score": INT,
    }
    made = loaderd_tf.schema_from_features(features, stored)
    assert dict(made.features) == dict(proposed["schema"].features)
    assert dict(made.fields) == dict(proposed["schema"].fields)
    assert made.spec_of("board").shape == (8, 8, 24)


def string(default: object = None, shape: object = ()) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature(shape, tf.string, default)


@pytest.mark.parametrize(
    ("shape", "dtype", "default"),
    [
        ([], tf.int64, [(1 << 62) + 1]),
        ([2, 2], tf.float32, [1, 2, 3, 4.0]),
        ([2], tf.int64, [[1], [2]]),
        ([], tf.int64, tf.constant(5, tf.int64)),
        ([2], tf.float32, tf.constant([1.0, 2.0])),
        ([2], tf.float32, [tf.constant(1.0), np.float32(2)]),
    ],
)
def test_defaults_of_numbers_are_those_of_parse_example(shape: list[int], dtype: tf.DType, default: object):
    """And no tensor is left in the schema, for which each worker would import TensorFlow."""
    features = {"x": tf.io.FixedLenFeature(shape, dtype, default)}
    (feature,) = loaderd_tf.schema_from_features(features).features.values()
    stored = np.frombuffer(feature.default_bytes, feature.row_dtype.base).reshape(shape)
    (parsed,) = tf.io.parse_example([b""], features)["x"].numpy()
    assert np.array_equal(stored, parsed)
    assert b"tensorflow" not in pickle.dumps(feature)


def test_a_default_of_one_value_or_another_number_of_values():
    fits = tf.io.FixedLenFeature([2], tf.int64, 7)
    assert loaderd_tf.schema_from_features({"x": fits}).features["x"] == loaderd.Int64((2,), default=[7, 7])
    with pytest.raises(SchemaError, match=r"Int64: default must fit int64 of shape \(2,\)"):
        loaderd_tf.schema_from_features({"x": tf.io.FixedLenFeature([2], tf.int64, [1, 2, 3])})
    described = loaderd.Raw("S16", pad=True, default=b"none")
    assert loaderd_tf.schema_from_features({"v": string("x")}, {"v": described}).features["v"] == described


BITS, INT = loaderd.PackedBits(15), tf.io.FixedLenFeature([], tf.int64)
REFUSED = [
    ({"d": string(shape=[2])}, {"d": BITS}, r"'d' must be one string \(shape \[\]\).*got PackedBits.* shape \(2,\)"),
    ({"d": string()}, {}, r"'d' must be one string .*bytes_features must say what it holds, got None"),
    ({"d": string()}, {"d": loaderd.Int64()}, r"bytes_features must say what it holds, got Int64"),
    ({"d": INT}, {"d": BITS}, r"'d' must be of int64 or float32, or of string if .* describes it, got int64"),
    (
        {"d": tf.io.VarLenFeature(tf.int64)},
        {},
        r"must be a tf\.io\.FixedLenFeature, got VarLen[^$]*\{'d': loaderd.Int64\(",
    ),
    ({"d": string("12345")}, {"d": BITS}, "'d': default_value of a string must be left out, got '12345'"),
    ({"i": INT}, {"x": BITS}, r"describes \['x'\], which features lacks"),
    *(
        (
            {"x": tf.io.FixedLenFeature([], tf.as_dtype(dtype))},
            {},
            rf"got {dtype}\n.*'x': .*Array\('x', dtype='{dtype}'",
        )
        for dtype in ("int32", "bool", "float64")
    ),
]


@pytest.mark.parametrize(("features", "described", "message"), REFUSED)
def test_what_is_refused(features: Any, described: Any, message: str):
    with pytest.raises(SchemaError, match=message):
        loaderd_tf.schema_from_features(features, described)


def test_what_is_no_dict():
    with pytest.raises(OptionError, match=r"features must be a dict, name -> tf.io.FixedLenFeature, got \[Fixed"):
        loaderd_tf.schema_from_features([INT])
    with pytest.raises(OptionError, match=r"bytes_features must be a dict, name -> PackedBits or Raw, got 'i'"):
        loaderd_tf.schema_from_features({"i": INT}, bytes_features="i")
