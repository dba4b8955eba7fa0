"""``unpack="device"`` in TensorFlow makes what the workers make, bit for bit: eagerly, in a graph and under XLA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from loaderd_tf.unpack import Unpacker

import loaderd
from loaderd import Array, Bits, Derived, Float, Int64, Packed, PackedBits, Raw, Schema
from loaderd.errors import OptionError
from tests.helpers import boards
from tests.helpers.decoding import decoded, random_rows
from tests.helpers.device_program import READY_MADE
from tests.helpers.numbered import SCHEMA, Numbered
from tests.schema.any_schema import schemas

MODES = {"eager": None, "graph": False, "xla": True}
OF_ONE_OR_TWO_BYTES = ["bfloat16", "float16", "int16", "uint8"]
DTYPES = ["bool", "uint8", "int32", "uint64", "float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]
CHESS = loaderd.schemas.chess_eval()


def in_mode(function: Any, mode: str) -> Any:
    return function if MODES[mode] is None else tf.function(function, jit_compile=MODES[mode])


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same names in the same order, dtypes and shapes, and every bit of every value."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert (found[name].shape, found[name].dtype) == (values.shape, values.dtype), name
        assert bytes_of(found[name]) == bytes_of(values), name


def bytes_of(values: Any) -> Any:
    array = np.asarray(values)
    return array.tolist() if array.dtype == object else array.tobytes()


def check(schema: Schema, mode: str, rows: np.ndarray[Any, Any]) -> None:
    expected = decoded(schema, rows)
    packed = decoded(loaderd_tf.packed_schema(schema), rows)
    names = [
        name
        for name, spec in schema.specs.items()
        if is_known(spec.dtype)
        and all(is_known(packed[feature].dtype) for feature in Unpacker(schema, [name]).inputs)
    ]
    unpacker = Unpacker(schema, names)
    found = in_mode(unpacker, mode)({name: tf.constant(packed[name]) for name in unpacker.inputs})
    assert_same(found, {name: expected[name] for name in names})


def is_known(dtype: np.dtype[Any]) -> bool:
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return False
    return dtype.isnative


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100, deadline=None)
@given(schemas())
def test_any_schema(mode: str, schema: Schema):
    check(schema, mode, random_rows(schema, 9))


@pytest.mark.parametrize(
    "mode", ["xla", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("graph", "eager"))]
)
@pytest.mark.parametrize("schema", READY_MADE)
def test_ready_made_schemas(mode: str, schema: Schema):
    check(schema, mode, random_rows(schema, 9))


@pytest.mark.one_variant
@pytest.mark.parametrize("mode", ["xla", "graph", "eager"])
def test_every_value_of_one_or_two_bytes(mode: str):
    """Scaled and shifted in two roundings, where XLA would round once; NaNs and subnormal numbers are kept."""
    whole = {"scale": 1, "offset": 1, "wrap": True}
    fields = {
        f"{stored} to {to}": Array(
            stored, dtype=to, **whole if to[0] in "biu" else {"scale": 1 / 255, "offset": -0.5}
        )
        for stored in OF_ONE_OR_TWO_BYTES
        for to in DTYPES
        if mode != "xla" or not to.startswith("float8")  # whose NaNs are one
        if stored[0] in "iu" or to[0] not in "biu"
    }
    schema = Schema({stored: Raw(stored) for stored in OF_ONE_OR_TWO_BYTES}, fields)
    rows = np.zeros(1 << 16, schema.row_dtype)
    for stored in OF_ONE_OR_TWO_BYTES:
        itemsize = rows[stored].itemsize
        rows[stored] = np.arange(1 << 16).astype(f"u{itemsize}").view(rows[stored].dtype)
    check(schema, mode, rows.view(np.uint8).reshape(len(rows), -1))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_wide_integers_that_are_scaled_in_their_own_dtype(dtype: str):
    scaled = {"doubled": Array("n", scale=2, wrap=True), "next": Array("n", offset=1, wrap=True), "n": Array("n")}
    schema = Schema({"n": Raw(dtype)}, scaled)
    check(schema, "eager", random_rows(schema, 9))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_bits_of_float8(dtype: str):
    schema = Schema({"b": PackedBits(64)}, {"b": Bits("b", (8, 8), scale=[-1, 0.5] * 4, dtype=dtype)})
    check(schema, "eager", random_rows(schema, 9))
    check(schema, "graph", random_rows(schema, 9))


def test_dtypes_that_tensorflow_cannot_unpack(numbered: Numbered):
    schema = Schema(SCHEMA.features, {"bits": Bits("bits", (32,), dtype="float8_e4m3fnuz"), "id": Array("id")})
    with loaderd.Loader(numbered.write([10]), schema, batch_size=5, unpack="device", workers=1) as loader:
        with pytest.raises(OptionError, match="TensorFlow cannot unpack fields of float8_e4m3fnuz on a device"):
            loaderd_tf.batches(loader)
        assert len(list(loaderd_tf.batches(loader, "id"))) == 2


def test_a_tensor_that_is_no_packed_field():
    with pytest.raises(OptionError, match=r"packed must have fields of \['d', 'score'\], got 'e'"):
        loaderd_tf.unpack({"e": np.zeros((2, 194), np.uint8)}, CHESS)
    with pytest.raises(OptionError, match=r"packed\['d'\] must be uint8, \(None, 194\), got uint8, \(2, 193\)"):
        loaderd_tf.unpack({"d": np.zeros((2, 193), np.uint8)}, CHESS)
    with pytest.raises(OptionError, match=r"packed\['d'\] must be uint8, \(None, 194\), got float32, \(2, 194\)"):
        loaderd_tf.unpack({"d": np.zeros((2, 194), np.float32)}, CHESS)


# ------------------------------------------------------------------------------------------------ from loaders

TEXT_AND_BITS = Schema(
    {"bits": PackedBits(32), "id": Int64(), "text": Raw("S9", default=b"some text")},
    {
        "bits": Bits("bits", (4, 8), dtype="bfloat16"),
        "text": Array("text"),
        "id": Array("id", scale=2, wrap=True),
        "sum": Derived(lambda bits: bits.sum(axis=(1, 2), dtype=np.float32), "bits"),
    },
)


@pytest.mark.parametrize("structure", [None, ("id", "bits")])
@pytest.mark.parametrize("device", [None, "/CPU:1"])
def test_batches_are_those_of_the_workers(numbered: Numbered, structure: Any, device: str | None):
    options: dict[str, Any] = {"batch_size": 64, "workers": 2, "epochs": 2}
    shards = numbered.write([1000, 300])
    with (
        loaderd.Loader(shards, TEXT_AND_BITS, **options) as plain,
        loaderd.Loader(shards, TEXT_AND_BITS, unpack="device", **options) as packed,
    ):
        expected = list(loaderd_tf.batches(plain, structure))
        found = list(loaderd_tf.batches(packed, structure, device=device))
    assert len(found) == len(expected) == 42
    for ours, theirs in zip(found, expected, strict=True):
        tf.nest.assert_same_structure(ours, theirs)
        for tensor, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
            assert tensor.dtype == other.dtype and np.array_equal(tensor, other)
            assert tensor.device.endswith((device or "/CPU:0")[1:]) or tensor.dtype == tf.string


@pytest.mark.parametrize("join", [lambda a, b: loaderd.Mix({"a": 0.5, "b": 0.5}, {"a": a, "b": b}), None])
@pytest.mark.parametrize("device", [None, "/CPU:1"])
def test_elements_are_packed(numbered: Numbered, join: Any, device: str | None):
    shards = numbered.write([60, 60])
    dataset = shards if join is None else join(*(loaderd.Dataset(path, TEXT_AND_BITS) for path in shards))
    schema = TEXT_AND_BITS if join is None else None
    options: dict[str, Any] = {"batch_size": 40, "workers": 1}
    plain = loaderd_tf.make_dataset(dataset, schema, **options)
    packed = loaderd_tf.make_dataset(dataset, schema, unpack="device", device=device, **options)
    assert list(packed.element_spec) == ["bits (stored)", "text", "id", "sum"]
    assert packed.element_spec["bits (stored)"] == tf.TensorSpec([None, 4], tf.uint8)
    with loaderd.Loader(dataset, schema, unpack="device", **options) as loader:
        of_loader = loaderd_tf.from_loader(loader)
        for expected, *elements in zip(plain, packed, of_loader, strict=True):
            for element in elements:
                assert_same(loaderd_tf.unpack(element, TEXT_AND_BITS), expected)
    for each in (plain, packed):
        each.close()


def test_structure_names_what_is_sent(numbered: Numbered):
    options: dict[str, Any] = {"batch_size": 64, "unpack": "device", "workers": 1}
    with loaderd_tf.make_dataset(numbered.write([9]), SCHEMA, structure=("bits (stored)", "id"), **options).loader:
        pass
    with pytest.raises(OptionError, match=r"structure must be made of the fields \['bits \(stored\)', 'id'\]"):
        loaderd_tf.make_dataset(numbered.write([9]), SCHEMA, structure="bits", **options)


def test_fields_of_boards(tmp_path: Path):
    records, schema = boards.boards(300), boards.schema()
    options: dict[str, Any] = {"batch_size": 64, "workers": 1}
    path = str(boards.write(tmp_path / "a.bin", records))
    with loaderd.Loader(path, schema, unpack="device", **options) as loader:
        boards.check(loaderd_tf.batches(loader), records)
    plain = loaderd_tf.make_dataset(path, schema, **options)
    packed = loaderd_tf.make_dataset(path, schema, unpack="device", **options)
    boards.check(plain, records)
    boards.check(({**element, **loaderd_tf.unpack(element, schema)} for element in packed), records)
    for each in (plain, packed):
        each.close()


# ---------------------------------------------------------------------------------------------------------- Keras


@pytest.mark.slow
def test_fit_learns_the_same_from_packed_batches(numbered: Numbered, tmp_path: Path):
    losses = []
    for unpack, structure in (("worker", ("bits", "id")), ("device", ("bits (stored)", "id"))):
        ds = loaderd_tf.make_dataset(
            numbered.write([400]), SCHEMA, batch_size=80, structure=structure, workers=1, unpack=unpack
        )
        keras.utils.set_random_seed(1)
        packed = unpack == "device"
        inputs = bits = keras.Input((4,), dtype="uint8") if packed else keras.Input((32,))
        if packed:
            bits = loaderd_tf.Unpack(SCHEMA)({"bits (stored)": inputs})["bits"]
        model = keras.Model(inputs, keras.layers.Dense(1, activation="tanh")(bits))
        model.compile("adam", "mse", jit_compile=True)
        losses.append(model.fit(ds, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    ((batch, _),) = ds.take(1)
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(again.predict(batch, verbose=0), model.predict(batch, verbose=0))


def test_the_layer_survives_its_config():
    schema = Schema(
        {"f": PackedBits(48, default=bytes(6)), "r": Raw(">u2", (3,)), "i": Int64(default=1), "unused": Float()},
        {
            "x": Bits("f", shape=(2, 12), start=5, channel_order=[*range(11, -1, -1)], scale=[0.5] * 12),
            "y": Array("r", dtype="float32", scale=0.1, offset=2, shape=(3, 1)),
            "z": Packed("f"),
            "derived": Derived(lambda x: x, "y", shape=(3, 1)),
        },
    )
    rows = random_rows(schema, 9)
    expected = decoded(schema, rows)
    del expected["derived"]  # is not given, and so not returned
    packed = {
        name: values for name, values in decoded(loaderd_tf.packed_schema(schema), rows).items() if name in "fr"
    }
    layer = loaderd_tf.Unpack(schema, name="first")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.name == "first" and not again.weights
    for each in (layer, again):
        assert_same(each(packed), expected)


@given(schemas())
@settings(max_examples=100)
def test_what_unpacks_is_a_schema_that_unpacks_the_same(schema: Schema):
    """The layer keeps the schema without what the workers finish, which names the same packed fields."""
    layer = loaderd_tf.Unpack(schema)
    assert str(loaderd_tf.Unpack(layer._schema)._schema) == str(layer._schema)
    assert loaderd_tf.packed_schema(layer._schema).specs == loaderd_tf.packed_schema(schema).specs
