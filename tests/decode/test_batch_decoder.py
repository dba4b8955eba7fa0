"""A batch as the decoder fills it, against the same formulas in plain TensorFlow operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import WorkerError
from loaderd.schema import Array, Bits, Derived, Float, Int64, PackedBits, Raw, Schema
from loaderd.schemas import chess_eval, mnist
from tests.helpers.decoding import AnyArray, Rows, rows_of
from tests.helpers.decoding import decoded as decode

pytestmark = pytest.mark.usefixtures("kernels")


def assert_equal(found: AnyArray, expected: Any) -> None:
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


# ------------------------------------------------------------------------------------------ chess and MNIST


def chess_features(num_records: int) -> dict[str, AnyArray]:
    rng = np.random.default_rng(1)
    scores = rng.integers(-3000, 3000, num_records)
    scores[: num_records // 2] = rng.integers(-60, 61, num_records // 2)  # moves to mate, mostly under 50
    return {"d": rng.integers(0, 256, (num_records, 194), dtype=np.uint8), "s": scores}


def chess_in_tensorflow(d: AnyArray, s: AnyArray, dtype: str, a: float, k: float, b: float) -> dict[str, tf.Tensor]:
    packed = tf.io.decode_raw([row.tobytes() for row in d], tf.uint8)
    shifts = tf.constant([7, 6, 5, 4, 3, 2, 1, 0], tf.uint8)
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(packed[:, :, tf.newaxis], shifts), tf.constant(1, tf.uint8))
    bits = tf.cast(tf.reshape(bits, (len(d), 1552)), dtype)
    groups = tf.reshape(bits[:, :1536], (len(d), 8, 8, 6, 4))
    members = [tf.gather(groups, member, axis=-1) for member in range(4)]
    score = tf.constant(s, tf.float64)
    decided = tf.sign(score) * (a + (1 - a) / (b - 1) * tf.maximum(tf.constant(0, tf.float64), b - tf.abs(score)))
    return {
        "board": tf.concat([members[0], -members[1], members[2], -members[3]], axis=-1),
        "flags": bits[:, 1536:1546],
        "score": tf.cast(tf.where(bits[:, 1546] == 1, decided, a * tf.tanh(score / k)), tf.float32),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_chess_eval_is_what_tensorflow_computes(dtype: str) -> None:
    schema = chess_eval(value_a=0.7, value_k=500.0, value_b=40.0, dtype=dtype)
    features = chess_features(1300)  # three chunks, the last one partial
    found = decode(schema, rows_of(schema, **features))
    expected = chess_in_tensorflow(features["d"], features["s"], dtype, 0.7, 500.0, 40.0)
    assert_equal(found["board"], expected["board"])
    assert_equal(found["flags"], expected["flags"])
    assert found["score"].dtype == np.float32
    np.testing.assert_allclose(found["score"], expected["score"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mnist_is_what_tensorflow_computes(dtype: str) -> None:
    # Four images with every byte at every place a few times over.
    images = np.random.default_rng(2).permuted(np.tile(np.arange(256, dtype=np.uint8), 4 * 784), axis=0)
    images = images.reshape(-1, 28, 28, 1)[:1024]
    labels = np.arange(len(images)) % 10
    schema = mnist()
    fields = {**schema.fields, "image": Array("image_raw", dtype=dtype, scale=1.0 / 255.0, offset=-0.5)}
    schema = Schema(schema.features, fields)
    found = decode(schema, rows_of(schema, image_raw=images, label=labels))
    assert_equal(found["image"], tf.cast(images, dtype) * (1.0 / 255.0) + (-0.5))
    assert_equal(found["label"], tf.cast(labels, tf.int32))


# ----------------------------------------------------------------------------------------- fields of an array


@pytest.mark.parametrize(
    ("feature", "values", "field", "expected"),
    [
        pytest.param(
            Raw(">u2", (2, 3)),
            np.arange(12).reshape(2, 2, 3) * 5000,
            Array("f", shape=(6,)),
            np.arange(12, dtype=np.uint16).reshape(2, 6) * 5000,
            id="big-endian, another shape",
        ),
        pytest.param(
            Raw("int8", (2,)),
            np.array([[-128, 127], [-1, 0]]),
            Array("f", dtype="bfloat16", offset=1),
            np.array([[-127, 128], [0, 1]], ml_dtypes.bfloat16),
            id="int8 to bfloat16",
        ),
        pytest.param(
            Float((2,)),
            np.array([[1.9, -1.9]]),
            Array("f", dtype="int32", wrap=True),
            np.array([[1, -1]], np.int32),
            id="truncated",
        ),
        pytest.param(
            Int64((1, 2)),
            np.array([[[2**40, -3]]]),
            Array("f", scale=-2, offset=1),
            np.array([[[1 - 2**41, 7]]]),
            id="int64 arithmetic",
        ),
        pytest.param(
            Float(),
            np.array([1e30, -1]),
            Array("f", dtype="float16", scale=2),
            np.array([np.inf, -2], np.float16),
            id="too large, without a warning",
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_array_fields(feature: Any, values: AnyArray, field: Array, expected: AnyArray) -> None:
    # An odd number of bytes before it, and a neighbour behind it.
    schema = Schema({"before": PackedBits(3), "f": feature, "after": PackedBits(8)}, {"x": field})
    assert_equal(decode(schema, rows_of(schema, f=values))["x"], expected)


# --------------------------------------------------------------------------------------------- derived fields


def derived_schema(function: Callable[..., Any], **keywords: Any) -> Schema:
    """``y``, float32, is derived from the delivered ``x`` (4 bits, float32) and the intermediate ``z`` (int64)."""
    derived = Derived(function, ("x", "z"), **{"shape": (), "dtype": "float32", **keywords})
    return Schema({"d": PackedBits(4), "s": Int64()}, {"x": Bits("d", shape=(4,)), "y": derived}, {"z": Array("s")})


def derived_rows(schema: Schema, num_records: int) -> Rows:
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 256, (num_records, 1), dtype=np.uint8)
    return rows_of(schema, d=bits, s=rng.integers(-9, 10, num_records))


def test_derived_fields_read_derived_fields_and_intermediates() -> None:
    schema = Schema(
        {"s": Int64()},
        {
            "last": Derived(lambda twice, total: twice[:, None] + total, ("twice", "total"), (2,), "int16"),
            "total": Derived(lambda s, twice: np.stack([s, twice], axis=1), ("s", "twice"), (2,), "float64"),
        },
        {"twice": Derived(lambda s: (2 * s).tolist(), "s", dtype="int32"), "s": Array("s")},
    )
    s = np.arange(-700, 700)
    found = decode(schema, rows_of(schema, s=s))
    assert set(found) == {"last", "total"}
    assert_equal(found["total"], np.stack([s, 2 * s], axis=1).astype(np.float64))
    assert_equal(found["last"], np.stack([3 * s, 4 * s], axis=1).astype(np.int16))


def test_a_derived_function_is_called_on_chunks_of_every_record_once() -> None:
    seen: list[AnyArray] = []

    def record(x: AnyArray, z: AnyArray) -> AnyArray:
        assert x.shape == (len(z), 4)
        assert x.dtype == np.float32 and z.dtype == np.int64
        seen.append(z.copy())
        return x.sum(axis=1) * z

    schema = derived_schema(record)
    rows = derived_rows(schema, 10_000)
    found = decode(schema, rows)
    stored = rows.view(schema.row_dtype)["s"].reshape(-1)
    assert len(seen) > 1
    assert_equal(np.concatenate(seen), stored)
    assert_equal(found["y"], (found["x"].sum(axis=1) * stored).astype(np.float32))


@pytest.mark.parametrize("victim", ["x", "z"])
def test_a_derived_function_cannot_write_to_its_inputs(victim: str) -> None:
    def corrupt(x: AnyArray, z: AnyArray) -> AnyArray:
        {"x": x, "z": z}[victim][...] = 7
        return z

    schema = derived_schema(corrupt)
    with pytest.raises(WorkerError, match=r"derived field 'y': its function raised ValueError: .*read-only"):
        decode(schema, derived_rows(schema, 3))


def test_a_raising_function_is_named_with_its_traceback() -> None:
    def divide(x: AnyArray, z: AnyArray) -> AnyArray:
        raise ZeroDivisionError("z must not be 0")

    schema = derived_schema(divide, shape=(2,))
    with pytest.raises(WorkerError) as caught:
        decode(schema, derived_rows(schema, 3))
    assert caught.value.message == (
        "derived field 'y': its function raised ZeroDivisionError: z must not be 0, "
        "where it must return an array that can be cast to float32, of shape (3, 2)"
    )
    assert "x: float32 (3, 4), z: int64 (3,)" in caught.value.hint
    assert 'raise ZeroDivisionError("z must not be 0")' in caught.value.traceback
    assert "in divide" in caught.value.traceback


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [SystemExit(3), Untold()])
def test_a_function_is_named_whatever_it_raises(error: BaseException) -> None:
    def end(x: AnyArray, z: AnyArray) -> AnyArray:
        raise error

    schema = derived_schema(end)
    with pytest.raises(WorkerError, match=f"derived field 'y': its function raised {type(error).__name__}: "):
        decode(schema, derived_rows(schema, 3))


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (np.zeros((3, 2)), r"returned float64 of shape (3, 2)"),
        (np.zeros(4, np.int8), r"returned int8 of shape (4,)"),
        (1.0, r"returned float64 of shape ()"),
        (["a", "b", "c"], r"returned <U1 of shape (3,)"),
        ([[1], [2, 3], [4]], r"raised ValueError: setting an array element with a sequence"),
        (None, r"returned object of shape ()"),
    ],
)
def test_a_result_that_does_not_fit_is_named(returned: Any, found: str) -> None:
    schema = derived_schema(lambda x, z: returned)
    with pytest.raises(WorkerError) as caught:
        decode(schema, derived_rows(schema, 3))
    assert f"its function {found}" in caught.value.message
    assert "an array that can be cast to float32, of shape (3,)" in caught.value.message


# -------------------------------------------------------------------------------------------- what is handed over


def test_one_decoder_takes_batches_of_any_size_from_read_only_rows() -> None:
    schema = chess_eval()
    features = chess_features(1200)
    rows = rows_of(schema, **features)
    rows.flags.writeable = False
    whole = decode(schema, rows)
    decoder = BatchDecoder(schema)
    slot = {name: np.empty_like(values) for name, values in whole.items()}
    start = 0
    for size in (1, 600, 0, 7, 592):
        piece = slice(start, start + size)
        decoder.decode(rows[piece], {name: values[piece] for name, values in slot.items()})
        start += size
    assert start == len(rows)
    for name, values in whole.items():
        assert_equal(slot[name], values)
