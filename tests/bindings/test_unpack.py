"""Unpacking by TensorFlow, against loaderd's own decoder: the same bits, eagerly, in a graph and compiled by XLA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderd
from loaderd import Array, Bits, Derived, Float, Int64, Packed, PackedBits, Raw, Schema
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import OptionError

AnyArray = npt.NDArray[Any]
MODES = {"eager": None, "graph": False, "xla": True}
# A graph is what XLA compiles, too: test_bits_of_any_kind and the data sets have one that TensorFlow runs itself.
QUICK_MODES = ["eager", pytest.param("graph", marks=pytest.mark.slow), "xla"]
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]


def random_rows(schema: Schema, count: int, seed: int = 0) -> AnyArray:
    """Rows of random bytes, structured, (count,)."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, schema.row_bytes), np.uint8)
    return rows.view(schema.row_dtype)[:, 0]


def decoded(schema: Schema, rows: AnyArray) -> dict[str, AnyArray]:
    """What the workers make of them."""
    out = {name: np.empty((len(rows), *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
    with np.errstate(all="ignore"):
        BatchDecoder(schema).decode(rows.view(np.uint8).reshape(len(rows), -1), out)
    return out


def stored(schema: Schema, rows: AnyArray) -> dict[str, AnyArray]:
    """The features as the workers deliver them: in the byte order of this machine."""
    return {name: rows[name].astype(rows[name].dtype.newbyteorder("=")) for name in schema.features}


def unpacked(schema: Schema, packed: Mapping[str, AnyArray], mode: str) -> dict[str, tf.Tensor]:
    """``unpack`` in one of MODES, at first with an unknown batch size, as Keras traces it."""
    if MODES[mode] is None:
        return loaderd_tf.unpack(packed, schema)
    tensors = {name: tf.constant(values) for name, values in packed.items()}
    signature = {name: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for name, tensor in tensors.items()}
    run = tf.function(lambda p: loaderd_tf.unpack(p, schema), jit_compile=MODES[mode], input_signature=[signature])
    return run(tensors)  # type: ignore[no-any-return]


def assert_same(found: Mapping[str, Any], expected: Mapping[str, AnyArray]) -> None:
    """The same names in the same order, dtypes and shapes, and every bit of every value."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == tf.as_dtype(values.dtype), name
        assert found[name].shape == values.shape, name
        # NaNs too: a look-up keeps their bits.
        assert np.asarray(found[name]).tobytes() == values.tobytes(), name


# ------------------------------------------------------------------------------------------------------- Bits


@st.composite
def bits(draw: st.DrawFn) -> Bits:
    """A Bits field of a feature of 400 bits, in any place, order, scale and dtype."""
    channels = draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24, 32, 40, 64]))
    leading = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    shape = (*leading, channels) if leading or channels > 1 or draw(st.booleans()) else ()
    start = draw(st.integers(0, 400 - math.prod(shape))) if math.prod(shape) <= 400 else 0
    start = draw(st.sampled_from([start, start // 8 * 8]))
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.none() | st.permutations(range(channels)))
    if dtype == "bool":
        value = st.sampled_from([0.0, 1.0])
    elif dtype[0] in "iu":
        value = st.integers(0 if dtype[0] == "u" else -128, 127).map(float)
    else:
        value = st.floats(width=16, allow_subnormal=True)
    scale = draw(st.none() | value | st.lists(value, min_size=channels, max_size=channels))
    return Bits("f", shape=shape, start=start, channel_order=order, scale=scale, dtype=dtype)


@pytest.mark.timeout(1200)  # in `make torture`, XLA compiles 300 fields
@pytest.mark.one_variant
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=settings.default.max_examples // 25)
@given(fields=st.lists(bits(), min_size=4, max_size=4))
def test_bits_of_any_kind(mode: str, fields: list[Bits]) -> None:
    schema = Schema(
        {"before": PackedBits(11), "f": PackedBits(601)}, {f"x{number}": field for number, field in enumerate(fields)}
    )
    rows = random_rows(schema, 5)
    assert_same(unpacked(schema, stored(schema, rows), mode), decoded(schema, rows))


@pytest.mark.parametrize("shape", [(2,), (3, 2), (1, 12), (5, 4), (3, 16), (1, 24), (3, 32)])
@pytest.mark.parametrize("start", [0, 8, 3])
def test_reordered_channels_that_fill_their_bytes_or_do_not(shape: tuple[int, ...], start: int) -> None:
    field = Bits("f", shape=shape, start=start, channel_order=(*range(1, shape[-1]), 0), dtype="int16")
    schema = Schema({"f": PackedBits(150)}, {"x": field})
    rows = random_rows(schema, 5)
    assert_same(unpacked(schema, stored(schema, rows), "eager"), decoded(schema, rows))


@pytest.mark.one_variant
@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_chess(mode: str, dtype: str) -> None:
    schema = loaderd.schemas.chess_eval(dtype=dtype)
    rows = random_rows(schema, 33)
    expected = decoded(schema, rows)
    score = expected.pop("score")
    assert_same(unpacked(schema, stored(schema, rows), mode), expected)
    finished = {**stored(schema, rows), "score": score}
    assert_same(unpacked(schema, finished, mode), {**expected, "score": score})


# -------------------------------------------------------------------------------------------- Packed and Array


@pytest.mark.one_variant
@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "int8", "uint16", ">i2", "float16"])
def test_every_value_of_one_or_two_bytes(mode: str, dtype: str) -> None:
    """Scaled and shifted in two roundings, where XLA would round once; NaNs and subnormal numbers are kept."""
    feature = Raw(dtype)
    arithmetic = [{}, {"scale": 1 / 255}, {"offset": -0.5}, {"scale": 1 / 255, "offset": -0.5}]
    whole = [{}, {"scale": 3}, {"offset": 7}, {"scale": 3, "offset": 7}]
    truths = [{}, {"scale": 0}, {"offset": 1}, {"scale": 1, "offset": 1}]
    fields = {}
    for to in DTYPES:
        if to[0] in "iu" and dtype in ("float16", "bfloat16"):
            continue
        for number, options in enumerate(truths if to == "bool" else whole if to[0] in "iu" else arithmetic):
            fields[f"{to} {number}"] = Array("f", dtype=to, wrap=to[0] in "iu", **options)
    schema = Schema({"f": feature}, fields)
    count = 256**feature.num_bytes
    rows = np.zeros(count, schema.row_dtype)
    rows["f"] = np.arange(count).astype(f"u{feature.num_bytes}").view(feature.dtype.newbyteorder("="))
    assert_same(unpacked(schema, stored(schema, rows), mode), decoded(schema, rows))


@pytest.mark.one_variant
@pytest.mark.parametrize("mode", QUICK_MODES)
def test_wide_integers_shapes_and_what_is_packed(mode: str) -> None:
    fields: dict[str, Any] = {"packed": Packed("bits"), "as stored": Array("f", shape=(2, 3))}
    for source in ("i", "u", "w"):
        for to in ("int8", "uint16", "int32", "uint32", "int64", "uint64"):
            fields[f"{source} {to}"] = Array(source, dtype=to, shape=(4, 1), wrap=True)
            fields[f"{source} {to}, computed"] = Array(source, dtype=to, scale=3, offset=100, wrap=True)
    features = {"bits": PackedBits(21), "f": Float((6,)), "i": Int64((4,))}
    schema = Schema({**features, "u": Raw(">u4", (2, 2)), "w": Raw("<u8", (4,))}, fields)
    rows = random_rows(schema, 50)
    assert_same(unpacked(schema, stored(schema, rows), mode), decoded(schema, rows))


def test_a_stored_feature_is_not_taken_for_the_field_of_its_name() -> None:
    schema = Schema({"v": Int64()}, {"v": Array("v", scale=2, wrap=True)})
    assert loaderd_tf.packed_schema(schema).fields["v"] == Array("v")
    assert loaderd_tf.unpack({"v": np.array([3, -4])}, schema)["v"].numpy().tolist() == [6, -8]


LEFT = {
    "wide floats": (Float(), Array("f", scale=2.0)),
    "rounded": (Float(), Array("f", dtype="float16")),
    "integers to floats": (Int64(), Array("f", dtype="float32")),
    "floats to integers": (Raw("float16"), Array("f", dtype="int32", wrap=True)),
    "bool": (Raw("bool"), Array("f", dtype="float32")),
    "float8": (PackedBits(8), Bits("f", shape=(8,), dtype="float8_e5m2")),
    "derived": (Int64(), Derived(lambda x: x, "stored")),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_the_workers(case: str) -> None:
    feature, field = LEFT[case]
    intermediates = {"stored": Array("f")} if case == "derived" else {}
    schema = Schema({"f": feature}, {"x": field}, intermediates)
    assert loaderd_tf.unpack(stored(schema, random_rows(schema, 3)), schema) == {}
    assert loaderd_tf.packed_schema(schema).specs == schema.specs


@pytest.mark.parametrize("field", [Array("f", dtype="uint16"), Array("f", scale=2)])
def test_the_workers_find_what_integers_do_not_hold(field: Array) -> None:
    schema = Schema({"f": Raw("int8")}, {"x": field})
    assert loaderd_tf.packed_schema(schema).fields == schema.fields
    stored = {"f": np.array([-100], np.int8)}
    assert loaderd_tf.unpack(stored, schema)["x"].numpy().tolist() == [65436 if field.scale is None else 56]
    wrapping = Schema({"f": Raw("int8")}, {"x": replace(field, wrap=True)})
    assert loaderd_tf.packed_schema(wrapping).fields == {"f": Array("f")}


def test_a_tensor_that_is_neither_feature_nor_field() -> None:
    schema = loaderd.schemas.mnist()
    image = np.zeros((2, 28, 28, 1), np.uint8)
    with pytest.raises(
        OptionError, match=r"packed\['img'\] must be named as one of \['image', 'image_raw', 'label'\]"
    ):
        loaderd_tf.unpack({"img": image}, schema)
    with pytest.raises(OptionError, match=r"'image_raw'\] must be uint8, \(n, 28, 28, 1\), got uint8, \(2, 784\)"):
        loaderd_tf.unpack({"image_raw": image.reshape(2, 784)}, schema)
    with pytest.raises(OptionError, match=r"'label'\] must be int64, \(n\) or int32, \(n\), got float32, \(2,\)"):
        loaderd_tf.unpack({"label": np.zeros(2, np.float32)}, schema)
    for dtype in ("int64", "int32"):  # as it is stored, and as the workers finish it
        labels = loaderd_tf.unpack({"label": np.array([3, 4], dtype)}, schema)
        assert labels["label"].dtype == tf.int32 and labels["label"].numpy().tolist() == [3, 4]
    named = Schema({"name": Raw("S4")}, {"name": Array("name")})
    texts = loaderd_tf.unpack({"name": tf.constant([b"a", b"bcd"])}, named)  # as the workers finish them
    assert texts["name"].numpy().tolist() == [b"a", b"bcd"]


# ------------------------------------------------------------------------------------------------ packed_schema


def test_the_schema_that_is_sent() -> None:
    chess = loaderd_tf.packed_schema(loaderd.schemas.chess_eval())
    assert list(chess.fields) == ["d", "score"] and chess.fields["d"] == Packed("d")
    mnist = loaderd_tf.packed_schema(loaderd.schemas.mnist())
    assert {name: spec.dtype.name for name, spec in mnist.specs.items()} == {"image_raw": "uint8", "label": "int32"}


def test_a_feature_and_a_field_of_one_name() -> None:
    fields = {"x": Array("f", dtype="float32"), "f": Derived(lambda x: x, "x")}
    with pytest.raises(OptionError, match="field 'f' is finished by the workers, and feature 'f' is unpacked on"):
        loaderd_tf.packed_schema(Schema({"f": Raw("uint8")}, fields))


# ------------------------------------------------------------------------------- make_dataset(…, unpack="device")


def go_schema() -> Schema:
    """What is derived here reads fields that are sent as features, one of them under the feature's name."""
    return Schema(
        features={"planes": PackedBits(19 * 19 * 8), "policy": Raw("float16", (362,)), "winner": Int64(default=0)},
        fields={
            "board": Bits("planes", shape=(19, 19, 8), scale=(1, 1, 1, 1, -1, 2, 0.1, 1), dtype="bfloat16"),
            "policy": Array("policy", dtype="float32", scale=0.3, offset=0.1),
            "value": Derived(lambda winner, komi: winner * 2.0 - komi, inputs=("winner", "komi")),
            "noise": Derived(lambda planes: planes, "planes", dtype="float64"),
            "turned": loaderd.board_symmetry("policy", (362,)),
            "mass": Derived(lambda policy, board: policy.sum(1) + board.sum((1, 2, 3)), inputs=("policy", "board")),
            "stack": loaderd.Planes([Derived(lambda noise, komi: np.stack([noise, komi], 1), ("planes", "komi"))]),
        },
        intermediates={
            "winner": Array("winner", dtype="float32"),
            "komi": Derived(lambda winner: winner * 0.0 + 1.0, inputs="winner"),
            # Its stream is that of its name, although the feature of that name is sent.
            "planes": Derived(lambda random: random.random(), (), dtype="float64", random=True),
        },
    )


def test_padded_features_on_a_device(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(40):
            example = tf.train.Example()
            feature = example.features.feature
            feature["id"].bytes_list.value.append(b"id %d" % 3**number)
            feature["moves"].int64_list.value.extend(rng.integers(-9, 400, number % 6).tolist())
            feature["clocks"].float_list.value.extend(rng.random(number % 4).tolist())
            feature["visits"].bytes_list.value.append(rng.bytes(2 * (number % 3)))
            writer.write(example.SerializeToString())
    features = {
        "id": Raw("S24", pad=True),
        "moves": Int64((2, 3), pad=-1),
        "clocks": Float((4,), pad=0.5),
        "visits": Raw("<u2", (2,), pad=7),
    }
    fields = {
        "id": Array("id"),
        "moves": Array("moves", scale=2, wrap=True),
        "clocks": Array("clocks"),
        "visits": Array("visits", "float32", scale=0.1),
    }
    options: dict[str, Any] = {"batch_size": 40, "shuffle": False, "workers": 1}
    schema = Schema(features, fields)
    (expected,) = loaderd_tf.make_dataset(str(path), schema, **options)
    (packed,) = loaderd_tf.make_dataset(str(path), schema, unpack="device", **options)
    assert packed["visits"].dtype == tf.uint16 and packed["visits"][0].numpy().tolist() == [7, 7]
    for mode in (None, False):
        found = tf.function(lambda p: loaderd_tf.unpack(p, schema), jit_compile=mode)(packed)
        for name, values in expected.items():
            assert found[name].numpy().tolist() == values.numpy().tolist()
    numbers = {name: packed[name] for name in ("moves", "clocks", "visits")}
    compiled = tf.function(lambda p: loaderd_tf.unpack(p, schema), jit_compile=True)(numbers)
    assert_same(compiled, {name: expected[name].numpy() for name in numbers})
    layer = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loaderd_tf.Unpack(schema)))
    assert_same(layer(numbers), {name: expected[name].numpy() for name in numbers})


@pytest.fixture(scope="module", params=["chess", "mnist", "go"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Schema]:
    """The path of a shard of 200 random records, and their schema."""
    makers = {"chess": loaderd.schemas.chess_eval, "mnist": loaderd.schemas.mnist, "go": go_schema}
    schema = makers[request.param]()
    path = tmp_path_factory.mktemp(request.param) / "a.tfrecord"
    write(path, schema, 200)
    return str(path), schema


def write(path: Path, schema: Schema, count: int) -> None:
    rng = np.random.default_rng(3)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(count):
            example = tf.train.Example()
            for name, feature in schema.features.items():
                if isinstance(feature, Int64):
                    example.features.feature[name].int64_list.value.append(int(rng.integers(-100, 100)))
                elif name == "policy":
                    example.features.feature[name].bytes_list.value.append(rng.random(362).astype("<f2").tobytes())
                else:
                    example.features.feature[name].bytes_list.value.append(rng.bytes(feature.num_bytes))
            writer.write(example.SerializeToString())


@pytest.mark.slow
def test_unpacked_elements_are_those_of_the_workers(kind: tuple[str, Schema]) -> None:
    path, schema = kind
    options: dict[str, Any] = {"batch_size": 128, "seed": 5, "workers": 1}
    finished = loaderd_tf.make_dataset(path, schema, **options)
    packed = loaderd_tf.make_dataset(path, schema, unpack="device", **options)
    assert len(packed) == len(finished) == 2
    assert list(packed.element_spec) != list(finished.element_spec)
    for element, expected in zip(packed, finished, strict=True):
        arrays = {name: tensor.numpy() for name, tensor in element.items()}
        for mode in MODES:
            assert_same(unpacked(schema, arrays, mode), {name: tensor.numpy() for name, tensor in expected.items()})


@pytest.mark.parametrize(
    "kind", ["chess", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mnist", "go"))], indirect=True
)
def test_packed_elements_on_a_device(kind: tuple[str, Schema]) -> None:
    path, schema = kind
    options: dict[str, Any] = {"batch_size": 64, "shuffle": False, "workers": 1, "remainder": "drop"}
    expected = next(iter(loaderd_tf.make_dataset(path, schema, **options)))
    described = loaderd.Dataset(path, schema, shuffle=False)
    del options["shuffle"]
    packed = loaderd_tf.make_dataset(described, unpack="device", device="/CPU:1", **options)
    element = next(iter(packed))
    assert {tensor.device.rsplit("/", 1)[1] for tensor in element.values()} == {"device:CPU:1"}
    with tf.device("/CPU:1"):
        found = tf.function(lambda e: loaderd_tf.unpack(e, schema), jit_compile=True)(element)
    assert {tensor.device.rsplit("/", 1)[1] for tensor in found.values()} == {"device:CPU:1"}
    assert_same(found, {name: tensor.numpy() for name, tensor in expected.items()})


UNCHANGED = {
    "left to the workers": ({"f": PackedBits(64)}, {"x": loaderd.Planes([Bits("f", (1, 8, 8), plane_bytes=8)])}),
    "as it is stored": ({"f": Int64((4,)), "b": PackedBits(8)}, {"x": Array("f", shape=(2, 2)), "y": Packed("b")}),
    "smaller than stored": ({"f": Int64()}, {"x": Array("f", dtype="int32")}),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_nothing_to_unpack(case: str, tmp_path: Path) -> None:
    schema = Schema(*UNCHANGED[case])
    path = tmp_path / "a.tfrecord"
    path.touch()
    kinds = r", ".join(rf"'{name}' \({type(field).__name__}\)" for name, field in schema.fields.items())
    with pytest.raises(OptionError, match=rf'unpack must be "worker" .* got "device" for the fields {kinds}'):
        loaderd_tf.make_dataset(path, schema, batch_size=2, unpack="device")


@pytest.mark.parametrize("kind", ["chess"], indirect=True)
def test_structure_names_what_is_sent(kind: tuple[str, Schema]) -> None:
    path, schema = kind
    names = list(loaderd_tf.packed_schema(schema).fields)
    packed = loaderd_tf.make_dataset(
        path, schema, batch_size=64, structure=(names[0], tuple(names[1:])), unpack="device", workers=1
    )
    inputs, targets = packed.element_spec
    assert inputs.dtype == tf.uint8 and len(targets) == len(names) - 1
    with pytest.raises(OptionError, match=r"structure must be made of the fields \['.*'\], got 'nonsense'"):
        loaderd_tf.make_dataset(path, schema, batch_size=64, structure="nonsense", unpack="device", workers=1)
    with pytest.raises(OptionError, match='unpack must be "worker" or "device", got \'gpu\''):
        loaderd_tf.make_dataset(path, schema, batch_size=64, unpack="gpu")


# ---------------------------------------------------------------------------------------------------------- Keras


def network(schema: Schema, packed: bool) -> keras.Model:
    """A dense layer on board and flags; ``packed``: which it unpacks itself."""
    keras.utils.set_random_seed(1)
    if packed:
        inputs = keras.Input((194,), dtype="uint8", name="d")
        fields = loaderd_tf.Unpack(schema)({"d": inputs})
        board, flags = fields["board"], fields["flags"]
    else:
        inputs = board, flags = keras.Input((8, 8, 24)), keras.Input((10,))
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(board), flags])
    model = keras.Model(inputs, keras.layers.Dense(1, activation="tanh")(hidden))
    model.compile("adam", "mse", jit_compile=True)
    return model


@pytest.mark.slow
def test_fit_learns_the_same_from_packed_batches(tmp_path: Path) -> None:
    schema = loaderd.schemas.chess_eval()
    write(tmp_path / "a.tfrecord", schema, 400)
    losses = []
    for unpack, structure in (("worker", (("board", "flags"), "score")), ("device", ("d", "score"))):
        ds = loaderd_tf.make_dataset(
            str(tmp_path / "a.tfrecord"), schema, batch_size=80, structure=structure, workers=1, unpack=unpack
        )
        model = network(schema, packed=unpack == "device")
        losses.append(model.fit(ds, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    ((batch, _),) = ds.take(1)
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(again.predict(batch, verbose=0), model.predict(batch, verbose=0))


def test_the_layer_survives_its_config() -> None:
    schema = Schema(
        {"f": PackedBits(48, default=bytes(6)), "r": Raw(">u2", (3,)), "i": Int64(default=1), "unused": Float()},
        {
            "x": Bits("f", shape=(2, 12), start=5, channel_order=[*range(11, -1, -1)], scale=[0.5] * 12),
            "y": Array("r", dtype="bfloat16", scale=0.1, offset=2, shape=(3, 1)),
            "z": Packed("f"),
            "derived": Derived(lambda x: x, "y", shape=(3, 1)),
        },
    )
    rows = random_rows(schema, 7)
    packed = {name: values for name, values in stored(schema, rows).items() if name in ("f", "r")}
    layer = loaderd_tf.Unpack(schema, name="first")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.name == "first" and not again.weights
    expected = decoded(schema, rows)
    del expected["derived"]
    for found in (layer(packed), again(packed)):
        assert_same(found, expected)
