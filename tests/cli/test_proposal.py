"""What ``loaderd inspect --features`` guesses of bytes, and what it says that no schema can hold."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd import testing
from loaderd.cli.main import main
from loaderd.cli.proposal import propose
from loaderd.cli.record_view import decode
from loaderd.cli.sample import sample_shards
from loaderd.errors import OptionError
from loaderd.progress import ProgressDisplay
from loaderd.storage.files import list_shards
from tests.decode.example_wire import bytes_list, entry, example

COUNT = 200
RANDOM = np.random.default_rng(0)


def proposed(folder: Path, records: Any) -> tuple[str, Mapping[str, Any]]:
    """The module for a shard of ``records``, and what its schema makes of them."""
    paths = testing.write_shards(folder, records)
    with closing(ProgressDisplay(None)) as display:
        sample = sample_shards(list_shards(paths), 1000, display)
    names: dict[str, Any] = {}
    exec(compile(module := propose(sample, 1), "records.py", "exec"), names)
    return module, next(decode(sample.kept, names["schema"], len(sample.kept)))


def boards(planes: int, side: int) -> Any:
    """bool, (COUNT, planes, side, side): planes of pieces of unlike number, each of which has its squares."""
    often = RANDOM.random((planes, side, side)) * RANDOM.permutation(np.geomspace(0.02, 0.9, planes))[:, None, None]
    return RANDOM.random((COUNT, planes, side, side)) < often


def packed(values: Any, order: str = "big") -> Any:
    return np.packbits(values.reshape(COUNT, -1), axis=1, bitorder=order)  # type: ignore[call-overload]


def serialized(values: Any) -> Any:
    tf = pytest.importorskip("tensorflow")
    texts = [tf.io.serialize_tensor(tf.constant(each)).numpy() for each in values]
    return np.frombuffer(b"".join(texts), np.uint8).reshape(COUNT, -1)


def saved(values: Any) -> Any:
    texts = []
    for each in values:
        np.save(stream := io.BytesIO(), each)
        texts.append(stream.getvalue())
    return np.frombuffer(b"".join(texts), np.uint8).reshape(COUNT, -1)


LAST = (0, 2, 3, 1)
CHESS, GO, SHOGI = boards(24, 8), boards(17, 19), boards(28, 9)
TENSORS = RANDOM.random((COUNT, 8, 8, 3), np.float32)
PIXELS = np.clip(128 + 9 * RANDOM.normal(size=(COUNT, 28, 28)).cumsum(1).cumsum(2), 0, 255).astype(np.uint8)


def as_bytes(values: Any) -> Any:
    return np.ascontiguousarray(values).view(np.uint8).reshape(COUNT, -1)


@pytest.mark.parametrize(
    ("stored", "expected", "said"),
    [
        (
            lambda: packed(CHESS.transpose(0, 2, 3, 1)),
            CHESS.transpose(0, 2, 3, 1),
            '"x": loaderd.Bits("x", (24, 8, 8)),',
        ),
        (lambda: packed(CHESS), CHESS, "Chosen: (24, 8, 8), as planes differ most in it."),
        (
            lambda: packed(RANDOM.random((COUNT, 8, 8, 24)) < 0.5),
            None,
            "Chosen: (8, 8, 24), from the number of bits.",
        ),
        (lambda: packed(GO), GO, "Chosen: (17, 19, 19), as planes differ most in it."),
        (lambda: packed(GO, "little"), GO, 'loaderd.Bits("x", (17, 19, 19), bit_order="little")'),
        (lambda: packed(np.pad(SHOGI.reshape(COUNT, 28, 81), ((0, 0), (0, 0), (0, 7)))), SHOGI, "plane_bytes=11"),
        (
            lambda: packed(np.concatenate([CHESS.reshape(COUNT, -1), np.ones((COUNT, 16), bool)], axis=1)),
            CHESS,
            '"x_rest": loaderd.Bits("x", (16,), start=1536)',
        ),
        (lambda: packed(RANDOM.random((COUNT, 368)) < 0.5), None, '\n        "x": loaderd.Bits("x", (368,)),'),
        (lambda: packed(boards(1, 19)), None, 'loaderd.Bits("x", (19, 19))'),
        (lambda: packed(RANDOM.random((COUNT, 2048)) < 0.02), None, '"x": loaderd.Sparse("x", '),
        (lambda: as_bytes(PIXELS), PIXELS, "784 bytes, which look like uint8."),
        (lambda: RANDOM.integers(0, 14, (COUNT, 81), np.uint8), None, 'loaderd.Raw("uint8", (9, 9))'),
        (lambda: RANDOM.integers(-1, 2, (COUNT, 361), np.int8), None, 'loaderd.Raw("int8", (19, 19))'),
        (lambda: RANDOM.integers(-300, 300, (COUNT, 81), np.int16), None, 'loaderd.Raw("int16", (81,))'),
        (lambda: RANDOM.integers(-9, 1858, (COUNT, 12), np.int32), None, 'loaderd.Raw("int32", (12,))'),
        (lambda: as_bytes(RANDOM.integers(0, 1858, (COUNT, 12))), None, 'loaderd.Raw("int64", (12,))'),
        (lambda: RANDOM.random((COUNT, 64)).astype(np.float16), None, 'loaderd.Raw("float16", (64,))'),
        (lambda: as_bytes(RANDOM.random((COUNT, 362), np.float32)), None, 'loaderd.Raw("float32", (362,))'),
        (
            lambda: as_bytes(RANDOM.random((COUNT, 10)) < 0.5).astype(np.float64),
            None,
            'loaderd.Raw("float64", (10,))',
        ),
        (lambda: RANDOM.normal(size=(COUNT, 10)), None, 'loaderd.Raw("float64", (10,))'),
        (lambda: serialized(TENSORS), TENSORS, "A tensor of tf.io.serialize_tensor: <f4 (8, 8, 3) behind a header"),
        (lambda: saved(TENSORS), TENSORS, "A tensor of numpy.save: <f4 (8, 8, 3) behind a header of 128"),
    ],
)
def test_what_bytes_hold(stored: Any, expected: Any, said: str, tmp_path: Path):
    values = stored()
    module, batch = proposed(tmp_path, {"x": values})
    assert said in module
    if expected is None and values.dtype != np.uint8:
        expected = values.reshape(batch["x"].shape)
    if expected is not None:
        np.testing.assert_array_equal(batch["x"], expected)


def saved_as(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"abcd"


@pytest.mark.parametrize(
    "value",
    [
        saved_as(b"-" * 9000 + b"1"),
        saved_as(b"(" * 9000),
        saved_as(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 60 + b"), }"),
        saved_as(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"),
        b"\x08\x01\x12" + bytes([4 * 30]) + b"\x12\x02\x08\x01" * 30 + b"\x22\x04abcd",
        RANDOM.bytes(1 << 20),
    ],
    ids=["signs", "brackets", "axes", "objects", "dims", "a mebibyte"],
)
def test_bytes_that_only_look_like_a_tensor_are_bytes(value: bytes, tmp_path: Path):
    module, batch = proposed(tmp_path, [example(entry("x", bytes_list(value)))] * 2)
    assert "A tensor" not in module and batch["x"].shape[0] == 2


JPEG = b"\xff\xd8\xff\xe0" + RANDOM.bytes(90)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (lambda n: example(entry("x", bytes_list(JPEG[: 60 + n]))), "'x' is left out: its values are JPEG pictures"),
        (lambda n: example(entry("x", bytes_list("größer ".encode() * (n + 40)))), "it is text of 360 to "),
        (lambda n: example(entry("x", bytes_list(RANDOM.bytes(9999 + n)))), "it has 9,999 to 10,008 bytes, and each"),
        (
            lambda n: RANDOM.bytes(40),
            "They have 40 bytes. CRCs are right, so this is what was written.",
        ),
        (lambda n: saved(TENSORS)[n].tobytes(), 'for FixedRecords([("header", "V128"), ("x", "<f4", (8, 8, 3))])'),
    ],
    ids=["jpeg", "text", "long", "no example", "tensor"],
)
def test_what_no_schema_can_hold_is_said(record: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (path,) = testing.write_shards(tmp_path, [record(number) for number in range(10)])
    for options, status in ((["--features"], 2), ([], 0)):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(path), *options])
        assert ended.value.code == status and said in "".join(capsys.readouterr())


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
VALUES = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), st.lists(st.binary(max_size=12), min_size=1, max_size=2)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=4))
def test_a_module_makes_the_schema_that_was_checked(tmp_path_factory: pytest.TempPathFactory, records: Any):
    """Whatever features have as names, and records hold: what is printed runs, and reads these records."""
    tf = pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("shards")
    made = []
    for record in records:
        features = {
            name: tf.train.Feature(bytes_list={"value": values})
            if values and isinstance(values[0], bytes)
            else tf.train.Feature(int64_list={"value": values})
            for name, values in record.items()
        }
        made.append(tf.train.Example(features={"feature": features}).SerializeToString())
    try:
        _, batch = proposed(folder, made)
    except OptionError as error:
        assert "no feature of the" in str(error)
        return
    for name, values in ((name, values) for name, values in records[0].items() if name in batch):
        stored = batch[name][0]
        if stored.dtype == np.int64 and values:
            assert stored.reshape(-1)[: len(values)].tolist() == values
        elif stored.dtype.kind == "S":
            assert [each.rstrip(b"\0") for each in stored.reshape(-1).tolist()[: len(values)]] == [
                each.rstrip(b"\0") for each in values
            ]
