"""The options of make_dataset, from_loader and distribute: those of a Loader, and what a mistake in one says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import LoaderdError, NoShardsError, OptionError, install_hint
from tests.helpers.numbered import Numbered


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function, eval_str=True).parameters
    return {name: (each.default, each.annotation) for name, each in found.items() if name != "self"}


def test_options_are_those_of_a_loader():
    of_loader = parameters(loaderd.Loader.__init__)
    of_loader["held_batches"] = (None, int | None)  # as many as TensorFlow holds
    own = {name: each for name, each in of_loader.items() if name not in ("shards", "schema", "batch_size")}
    of_make_dataset = parameters(loaderd_tf.make_dataset)
    assert own.items() <= of_make_dataset.items()
    assert set(of_make_dataset) - set(of_loader) == {"structure", "prefetch", "device"}


@pytest.mark.parametrize(
    ("function", "option", "said"),
    [
        (loaderd.Loader, "drop_remainder", ': give remainder="drop"'),
        (loaderd.Loader, "compression_type", ": leave it out: compression is recognized by content"),
        (loaderd.Loader, "pin_memory", ": use device= of batches of loaderd_torch, loaderd_jax or loaderd_tf"),
        (loaderd.Loader, "prefetch", ": leave it out: the workers are ahead by themselves"),
        (loaderd.Loader, "wokers", "; did you mean workers=?"),
        (loaderd.Loader, "xyzzy", f"; it has {', '.join(inspect.signature(loaderd.Loader).parameters)}"),
        (loaderd_tf.make_dataset, "num_workers", ": give workers="),
        (loaderd_tf.make_dataset, "buffer_size", ": give shuffle=Shuffle(window_records=…)"),
        (loaderd.connect, "worker_count", ": give workers="),
        (loaderd.connect, "seed", ": give it where the server's data set is made"),
        (loaderd.connect, "sampler", ": give shuffle=, and shard=(i, n) where the server's data set is made"),
        (loaderd.Dataset, "batch_size", ": give it where the loader is made"),
        (loaderd.Dataset, "drop_last", ': give remainder="drop" where the loader is made'),
        (loaderd.Dataset, "on_corupt", "; did you mean on_corrupt=?"),
        (loaderd.Mix, "weight", "; did you mean weights=?"),
        (loaderd.Shuffle, "window", "; did you mean window_records=?"),
        (loaderd_tf.batches, "batch_size", ": give it where the loader is made"),
        (loaderd_tf.batches, "num_workers", ": give workers= where the loader is made"),
        (loaderd_tf.from_loader, "structur", "; did you mean structure=?"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_other_names_of_options(function: Any, option: str, said: str):
    with pytest.raises(TypeError, match=f"^{re.escape(f'{function.__name__} has no option {option!r}{said}')}$"):
        function(**{option: 2})


def test_a_dtype_that_tensorflow_lacks(numbered: Numbered):
    shards = numbered.write([10])
    fields: dict[str, Any] = {"id": loaderd.Array("id"), "day": loaderd.Derived(lambda id: id.astype("M8[D]"), "id")}
    schema = loaderd.Schema({"id": loaderd.Int64()}, fields)
    expected = r"dtypes that TensorFlow has, got field 'day' of datetime64\[D\]\nLeave it out"
    with pytest.raises(OptionError, match=expected):
        loaderd_tf.make_dataset(shards, schema, batch_size=5)
    with loaderd.Loader(shards, schema, batch_size=5, workers=1) as loader:
        for make in (loaderd_tf.from_loader, loaderd_tf.batches):
            with pytest.raises(OptionError, match=expected):
                make(loader)
        assert [each.numpy().tolist() for each in loaderd_tf.batches(loader, "id")] != []


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
    ({"schema": {"d": tf.io.FixedLenFeature([], tf.string)}}, "(?s)schema must be a loaderd.Schema.*_from_features"),
    ({"schema": loaderd.schemas.chess_eval}, r"(?s)schema must be a loaderd.Schema, got .*Call it: chess_eval\(\)"),
    ({"schema": None}, "schema must be a loaderd.Schema, got None"),
    ({"shards": tf.data.Dataset.from_tensors("a")}, "(?s)shards must be a path.*give the glob itself"),
    ({"shards": 5}, "shards must be a path, a glob, a URI or a list of them, got 5"),
    ({"shards": [5]}, "shards must be a path, a glob, a URI or a list of them, got 5"),
    ({"shards": iter([])}, "at least one file"),
    ({"prefetch": 3}, "(?s)prefetch must be left out where there is no device=, got 3.*give device=, too"),
    ({"prefetch": "2"}, "prefetch must be a number of batches, 0 or more, got '2'"),
    ({"prefetch": tf.data.AUTOTUNE}, "(?s)prefetch must be a number of batches, 0 or more, got -1.*AUTOTUNE"),
    ({"structure": {"bits", "id"}}, r"structure must be made of the fields \['bits', 'id'\], got {"),
    ({"structure": ("bits", None)}, r"structure must be made of the fields \['bits', 'id'\], got None"),
    ({"structure": ()}, r"structure must be made of the fields \['bits', 'id'\], got \(\)"),
    ({"structure": {"x": "ids"}}, "structure must be made of the fields .* got 'ids'"),
    ({"device": 5}, "device must be text such as .*, got 5"),
    ({"unpack": "gpu"}, 'unpack must be "worker" or "device", got \'gpu\''),
    ({"start": (0, 3)}, r"start must be what state_dict\(\) returned, or a loaderd.Position, got \(0, 3\)"),
    ({"shard": (2, 2)}, "shard must be a pair"),
]


@pytest.mark.parametrize(("options", "text"), MISTAKES)
def test_a_mistake_is_named_before_a_process_is_started(
    numbered: Numbered, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
):
    def start(module: str) -> Any:
        raise AssertionError(f"{module} was started")

    monkeypatch.setattr("loaderd.client.transport.start_process", start)
    given = {"shards": numbered.write([10]), "schema": numbered.schema, "batch_size": 5, **options}
    with pytest.raises((OptionError, NoShardsError), match=text):
        loaderd_tf.make_dataset(**given)
    of_tensorflow = isinstance(options.get("shards"), tf.data.Dataset)  # to a Loader, it is an iterable of paths
    if not of_tensorflow and not {"structure", "prefetch", "device", "unpack"} & set(options):
        with pytest.raises(LoaderdError, match=text):
            loaderd.Loader(**{"shards": numbered.write([10]), **given})


def test_what_is_no_loader():
    with pytest.raises(OptionError, match=r"loader must be a loaderd\.Loader, or what loaderd\.connect .*, got 'x'"):
        loaderd_tf.from_loader("x")


def test_what_is_taken_for_a_number_or_a_dtype(numbered: Numbered):
    schema = loaderd.Schema(
        {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
        {"bits": loaderd.Bits("bits", (32,), dtype=tf.bfloat16), "id": loaderd.Array("id", dtype=tf.float32)},
    )
    paths = numbered.write([30, 30])
    dataset = loaderd_tf.make_dataset(
        paths[0].parent.glob("*.tfrecord"),
        schema,
        batch_size=np.int64(20),
        prefetch=np.int8(1),
        device="/CPU:0",
        epochs=np.uint16(2),
        workers=np.int64(1),
        start=loaderd.Position(np.int64(0), np.int64(1)),
    )
    assert dataset.element_spec["bits"].dtype == tf.bfloat16 and dataset.element_spec["id"].dtype == tf.float32
    assert sum(len(element["id"]) for element in dataset) == 100
    position = dataset.loader.next_position()
    assert loaderd.Position.from_json(position.to_json()) == position
    dataset.close()


def test_a_data_set_has_its_loader(numbered: Numbered):
    dataset = loaderd_tf.make_dataset(numbered.write([40]), numbered.schema, batch_size=20, workers=1)
    text = "<Loader of 40 records in 1 shards: bits, id, in batches of 20; at batch 0 of epoch 0>"
    assert isinstance(dataset.loader, loaderd.Loader) and repr(dataset.loader) == text
    assert sum(1 for _ in dataset) == 2
    assert dataset.statistics().batches_delivered == 2 and dataset.diagnose().verdict == "nothing yet"
    assert not hasattr(dataset.map(lambda element: element["id"]), "loader"), "an object of TensorFlow's"
    dataset.close()
    with pytest.raises(tf.errors.UnknownError, match="closed"):
        next(iter(dataset))


def test_without_tensorflow_the_extra_is_named():
    code = """
import sys
sys.modules["tensorflow"] = None  # as it is where it is not installed
try:
    import loaderd_tf
except ImportError as error:
    print(error.name, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"tensorflow loaderd_tf needs TensorFlow: {install_hint('tensorflow')}, or"), done
