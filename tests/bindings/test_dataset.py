"""The loader as a tf.data.Dataset, on shards that TensorFlow itself wrote."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import DAEMON, children_of, newest_daemon, wait_ends

RECORDS = 1000


@pytest.fixture(scope="module")
def chess(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of random chess_eval records: plain, GZIP and ZLIB, all named alike."""
    folder = tmp_path_factory.mktemp("chess")
    rng = np.random.default_rng(7)
    paths = []
    for shard, compression in enumerate(("", "GZIP", "ZLIB")):
        path = str(folder / f"{shard}.tfrecord")
        with tf.io.TFRecordWriter(path, compression) as writer:
            for _ in range(RECORDS // 4 * (1 + (shard == 0))):
                features = {
                    "d": tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(194)])),
                    "s": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(rng.integers(-3000, 3000))])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
        paths.append(path)
    return paths


def plain_tensorflow(shards: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """board, flags and score of every record, by TensorFlow alone and written as plainly as can be."""
    return _plain_tensorflow(tuple(shards))


@functools.cache
def _plain_tensorflow(shards: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(
            record, {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}
        )
        data = tf.io.decode_raw(parsed["d"], tf.uint8)
        masks = tf.constant([128, 64, 32, 16, 8, 4, 2, 1], tf.uint8)
        bits = tf.reshape(tf.cast(tf.bitwise.bitwise_and(data[:, None], masks) > 0, tf.float32), [-1])
        planes = tf.reshape(bits[:1536], [8, 8, 6, 4])
        groups = [planes[..., member] * (1.0, -1.0, 1.0, -1.0)[member] for member in range(4)]
        score = tf.cast(parsed["s"], tf.float32)
        a, k, b = 0.8, 600.0, 50.0
        decided = tf.sign(score) * (a + (1 - a) / (b - 1) * tf.maximum(0.0, b - tf.abs(score)))
        return tf.concat(groups, axis=-1), bits[1536:1546], tf.where(bits[1546] > 0, decided, a * tf.tanh(score / k))

    found = [
        [tensor.numpy() for tensor in element]
        for path, compression in zip(shards, ("", "GZIP", "ZLIB"), strict=True)
        for element in tf.data.TFRecordDataset(path, compression).map(decode).batch(RECORDS)
    ]
    boards, flags, scores = map(np.concatenate, zip(*found, strict=True))
    return boards, flags, scores


def address(tensor: tf.Tensor) -> int:
    return int(np.asarray(tensor).ctypes.data)


@pytest.fixture(scope="module")
def schema() -> loaderd.Schema:
    return loaderd.schemas.chess_eval()


def test_values_are_those_of_tensorflow(chess: list[str], schema: loaderd.Schema):
    ds = loaderd_tf.make_dataset(chess, schema, batch_size=128, shuffle=False, workers=2)
    batches = list(ds)
    board, flags, score = plain_tensorflow(chess)
    assert np.array_equal(np.concatenate([b["board"] for b in batches]), board)
    assert np.array_equal(np.concatenate([b["flags"] for b in batches]), flags)
    np.testing.assert_allclose(np.concatenate([b["score"] for b in batches]), score, atol=1e-6)


def test_structure_shapes_and_cardinality(chess: list[str], schema: loaderd.Schema):
    ds = loaderd_tf.make_dataset(
        chess, schema, batch_size=128, structure=(("board", "flags"), "score"), remainder="drop", workers=1
    )
    assert ds.element_spec == (
        (tf.TensorSpec((128, 8, 8, 24)), tf.TensorSpec((128, 10))),
        tf.TensorSpec((128,)),
    )
    assert len(ds) == int(ds.cardinality()) == RECORDS // 128
    short = loaderd_tf.make_dataset(chess, schema, batch_size=128, workers=1)
    assert list(short.element_spec) == ["board", "flags", "score"]
    assert short.element_spec["board"].shape.as_list() == [None, 8, 8, 24]
    assert len(short) == 8
    endless = loaderd_tf.make_dataset(chess, schema, batch_size=128, epochs=None, remainder="carry", workers=1)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    assert endless.element_spec["score"].shape == [128]
    assert sum(1 for _ in endless.take(20)) == 20
    one = loaderd_tf.make_dataset(chess, schema, batch_size=128, structure="score", workers=1)
    assert next(iter(one)).shape == [128]


@pytest.mark.parametrize("in_graph", [False, True])
def test_each_pass_is_an_epoch_of_its_own(chess: list[str], schema: loaderd.Schema, in_graph: bool):
    ds = loaderd_tf.make_dataset(chess, schema, batch_size=100, structure="score", workers=2)

    def consume() -> tf.Tensor:
        scores = tf.TensorArray(tf.float32, size=0, dynamic_size=True, infer_shape=False)
        for score in ds:
            scores = scores.write(scores.size(), score)
        return scores.concat()

    run = tf.function(consume) if in_graph else consume
    first, second = run().numpy(), run().numpy()
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.sort(second)) and len(first) == RECORDS


def test_a_batch_is_taken_over_without_a_copy(chess: list[str], schema: loaderd.Schema):
    """Every tensor lies in the loader's shared memory; its slot comes back when the tensor is gone, not before."""
    loader = loaderd.Loader(chess, schema, batch_size=50, workers=1, held_batches=6)
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:loaderd-slots" in line
    ]
    ds = loaderd_tf.from_loader(loader, prefetch=0)
    kept = []
    for element in ds.take(4):
        for tensor in element.values():
            where = address(tensor)
            assert any(start <= where < stop for start, stop in mapped)
        kept.append(element)
    assert loader.statistics().slots_lent >= 4
    assert loader.statistics().batches_copied == 0
    values = kept[0]["score"].numpy()
    before = loader.statistics().slots_lent
    del kept[1:], element, tensor
    gc.collect()
    tf.constant(0)  # TensorFlow drops what it holds of an array at the next chance
    assert loader.statistics().slots_lent < before
    for _ in ds:
        assert np.array_equal(kept[0]["score"].numpy(), values), "a slot that is held is not filled again"
    loader.close()


def test_steps_are_fetched_in_order(chess: list[str], schema: loaderd.Schema):
    """TensorFlow runs stateless maps in parallel where it can: here that would make the workers jump to and fro."""
    with loaderd.Loader(chess, schema, batch_size=20, workers=1) as loader:
        ds = loaderd_tf.from_loader(loader, structure="score")
        for _ in range(3):
            assert sum(1 for _ in ds.map(lambda score: score * 2).repeat(2)) == 100
        assert loader.statistics().starts == 6


def test_a_list_of_all_batches_and_a_cache(chess: list[str], schema: loaderd.Schema):
    ds = loaderd_tf.make_dataset(chess, schema, batch_size=10, structure="score", shuffle=False, workers=2)
    _, _, score = plain_tensorflow(chess)
    kept = list(ds)
    assert len(kept) == RECORDS // 10
    np.testing.assert_allclose(np.concatenate(kept), score, atol=1e-6)
    cached = ds.cache()
    for _ in range(2):
        np.testing.assert_allclose(np.concatenate(list(cached)), score, atol=1e-6)


def test_skip_of_a_shuffled_data_set_warns(chess: list[str]):
    """With ``take``, it is no split: each iteration shuffles anew."""
    options: dict[str, Any] = {"batch_size": 100, "workers": 1}
    shuffled = loaderd_tf.make_dataset(chess, loaderd.schemas.chess_eval(), **options)
    with pytest.warns(UserWarning, match=r"Dataset\(…\)\.split") as caught:
        rest = shuffled.skip(3)
    assert caught[0].filename == __file__ and len(list(rest)) == 7
    unshuffled = loaderd_tf.make_dataset(chess, loaderd.schemas.chess_eval(), shuffle=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unshuffled.skip(3), shuffled.take(1)


def test_batches_are_copied_to_a_device(chess: list[str], schema: loaderd.Schema):
    ds = loaderd_tf.make_dataset(
        chess, schema, batch_size=100, device="/CPU:1", shuffle=False, workers=1, remainder="drop"
    )
    assert len(ds) == 10 and ds.element_spec["board"].shape == (100, 8, 8, 24)
    for _ in range(2):
        elements = list(ds)
        assert {tensor.device.rsplit("/", 1)[1] for e in elements for tensor in e.values()} == {"device:CPU:1"}
        np.testing.assert_allclose(
            np.concatenate([e["score"] for e in elements]), plain_tensorflow(chess)[2], atol=1e-6
        )


@pytest.mark.parametrize("device", ["/GPU:7", "/CPU:2", "nonsense"])
def test_a_device_that_is_not_there(chess: list[str], schema: loaderd.Schema, device: str):
    with pytest.raises(OptionError, match=r"device must be one of \['/device:CPU:0', '/device:CPU:1'\], got"):
        loaderd_tf.make_dataset(chess, schema, batch_size=100, device=device)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float16", "float64", "int32"))],
)
def test_any_dtype_reaches_tensorflow(chess: list[str], dtype: str):
    ds = loaderd_tf.make_dataset(
        chess, loaderd.schemas.chess_eval(dtype=dtype), batch_size=500, shuffle=False, workers=1
    )
    assert ds.element_spec["board"].dtype == tf.as_dtype(dtype)
    boards = [element["board"].numpy() for element in ds]
    assert np.array_equal(np.concatenate(boards).astype(np.float32), plain_tensorflow(chess)[0])


def test_a_position_is_counted_where_tensorflow_takes_batches_ahead(chess: list[str], schema: loaderd.Schema):
    with loaderd.Loader(chess, schema, batch_size=100, epochs=2, workers=1) as loader:
        begin = loader.next_position()
        taken = [element["score"].numpy() for element in loaderd_tf.from_loader(loader).take(5)]
        with pytest.raises(OptionError, match=r"loader.after\(begin, batches\)"):
            _ = loader.position
        loader.load_state_dict(loader.after(begin, 3))
        assert loader.position == loader.after(begin, 3)
        assert np.array_equal(next(iter(loader))["score"], taken[3])
        assert loader.position == loader.after(begin, 4)


def test_tensorflow_writes_into_slices_of_a_slot(chess: list[str], schema: loaderd.Schema):
    """In place, where it believes that nobody else needs them: each of these was a segmentation fault once."""
    dataset = loaderd_tf.make_dataset(
        chess, schema, batch_size=100, shuffle=False, workers=1, structure=("board", "score")
    )
    batches = [(board.numpy(), score.numpy()) for board, score in dataset]
    half = np.float32(0.5)
    programs = [
        (lambda x, y: (x[:50] * 2, y[:50]), lambda x, y: (x[:50] * 2, y[:50])),
        (lambda x, y: (0.5 * x[:50] + 0.5 * x[50:], y), lambda x, y: (half * x[:50] + half * x[50:], y)),
        (lambda x, y: (x[0] * 2, y[1:]), lambda x, y: (x[0] * 2, y[1:])),
        (lambda x, y: tuple(part + 1 for part in tf.split(x, 4)), lambda x, y: [p + 1 for p in np.split(x, 4)]),
        (lambda x, y: tuple(row - 1 for row in tf.unstack(x, 100)), lambda x, y: [row - 1 for row in x]),
    ]
    for program, expected in programs:
        for element, batch in zip(dataset.map(program), batches, strict=True):
            assert all(map(np.array_equal, element, expected(*batch)))


def test_an_error_in_a_worker_reaches_the_loop(chess: list[str]):
    def fail(score: np.ndarray) -> np.ndarray:
        raise RuntimeError(f"no score for {len(score)} records")

    failing = loaderd.Schema(
        {"s": loaderd.Int64()},
        {"score": loaderd.Derived(fail, "stored", (), "float32")},
        {"stored": loaderd.Array("s")},
    )
    ds = loaderd_tf.make_dataset(chess, failing, batch_size=100, workers=1)
    with pytest.raises(tf.errors.UnknownError, match=r"derived field 'score'.*no score for 100 records"):
        next(iter(ds))


def test_the_daemon_ends_with_the_data_set(chess: list[str], schema: loaderd.Schema):
    ds = loaderd_tf.make_dataset(chess, schema, batch_size=100, workers=1)
    iterator = iter(ds)
    batch = next(iterator)
    watch = os.pidfd_open(newest_daemon())
    del ds, iterator
    gc.collect()
    wait_ends([watch], 60)
    assert batch["score"].shape == [100]


def test_the_daemon_may_die_under_an_iterator(chess: list[str], schema: loaderd.Schema):
    options = {"batch_size": 50, "structure": "score", "shuffle": loaderd.Shuffle(200, 32)}
    expected = [score.numpy() for score in loaderd_tf.make_dataset(chess, schema, **options, workers=1)]
    found = []
    dataset = loaderd_tf.make_dataset(chess, schema, **options, workers=2)
    for score in dataset:
        if len(found) in (0, 5, 6, 13):
            for daemon in children_of(os.getpid(), DAEMON):  # none, if one that was killed has not been missed yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(daemon, signal.SIGKILL)
        found.append(score.numpy())
    assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
    assert dataset.loader.statistics().daemon_restarts >= 1


# ------------------------------------------------------------------------------------ who imports TensorFlow


def test_the_core_does_not_import_tensorflow():
    code = "import sys, loaderd; assert not [m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'keras')]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_worker_of_a_script_that_imports_tensorflow(numbered: Numbered, tmp_path: Path):
    """The main script is not run again in a worker, which imports no TensorFlow and sees no GPU."""
    shards = [str(path) for path in numbered.write([100])]
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        print("the main script runs", flush=True)
        import tensorflow as tf
        import numpy as np
        import loaderd

        def look(ids):
            import os, sys
            seen = "tensorflow" in sys.modules, os.environ["CUDA_VISIBLE_DEVICES"] != "-1", "train" in sys.modules
            return np.broadcast_to(np.array(seen), (len(ids), 3))

        schema = loaderd.Schema(
            {{"id": loaderd.Int64()}},
            {{"seen": loaderd.Derived(look, "id", shape=(3,), dtype="bool")}},
            {{"id": loaderd.Array("id")}},
        )
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        with loaderd.Loader({shards!r}, schema, batch_size=10, workers=2) as loader:
            assert not any(batch["seen"].any() for batch in loader)
        """)
    )
    result = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert result.stdout.count("the main script runs") == 1
