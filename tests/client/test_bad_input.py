"""Damaged shards, records that do not fit, functions that fail, and arguments that are none: what each ends in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import (
    CorruptRecordError,
    EmptyBatchError,
    NoShardsError,
    OptionError,
    RecordMismatchError,
    SchemaError,
    ShardReadError,
    WorkerError,
)
from loaderd.formats.framing import MAX_RECORD_BYTES
from loaderd.kernels.crc import framed
from loaderd.plan.passes import Pass
from tests.client.damage import damage_data
from tests.helpers.numbered import Numbered
from tests.helpers.record_bytes import field, header

Write = Callable[..., list[Path]]


def test_damage_is_named_before_training(numbered: Numbered):
    shards = numbered.write([100, 100])
    offset = damage_data(shards[1], 42)
    with pytest.raises(CorruptRecordError) as caught:
        numbered.loader(shards)
    message = str(caught.value)
    assert f"{shards[1]}: record 42 at byte {offset}: expected data with CRC32C" in message
    assert "1 damaged record in 1 of 2 shards" in message and "skip_record" in message
    assert caught.value.damage is not None and caught.value.damage.record == 42


def test_a_record_that_is_too_large_is_not_called_damaged(numbered: Numbered):
    (shard,) = numbered.write([10])
    whole = shard.read_bytes()
    with open(shard, "wb") as large:
        large.write(header(MAX_RECORD_BYTES + 1))
        large.seek(MAX_RECORD_BYTES + 5, os.SEEK_CUR)
        large.write(whole)
    with pytest.raises(CorruptRecordError) as caught:
        numbered.loader(shard)
    message = str(caught.value)
    assert "record 0 at byte 0: expected a record of at most 1073741824 bytes, found a whole one of" in message
    assert "Write what is larger as several records, or pass on_corrupt" in message and "Restore" not in message
    with numbered.loader(shard, on_corrupt="skip_record", epochs=1) as loader:
        assert sorted(numbered.records(loader)) == list(range(10))


@pytest.mark.parametrize(("policy", "missing"), [("skip_record", [142]), ("skip_shard", list(range(100, 200)))])
def test_damage_is_left_out(numbered: Numbered, policy: str, missing: list[int]):
    shards = numbered.write([100, 100, 100])
    damage_data(shards[1], 42)
    with warnings.catch_warnings(record=True) as warned:
        loader = loaderd.Loader(shards, numbered.schema, batch_size=10, workers=1, on_corrupt=policy)  # type: ignore
    with loader:
        order = numbered.batches(loader)
        assert sorted(chain.from_iterable(order)) == [n for n in range(300) if n not in missing]
        assert all(len(batch) == 10 for batch in order[:-1]), "damage that the index found leaves no hole"
        (damage,) = loader.statistics().damages
        assert (damage.shard, damage.record) == (str(shards[1]), 42)
    said = {
        "skip_record": "1 damaged record in 1 of 3 shards is left out",
        "skip_shard": f"1 of 3 shards are damaged and left out whole, with 99 sound records: {shards[1]}",
    }[policy]
    (warning,) = warned
    assert warning.category is loaderd.errors.SkippedDataWarning and warning.filename == __file__
    assert str(warning.message) == f'on_corrupt="{policy}": {said}; the first damage: {damage}'


def test_a_shard_that_is_damage_alone_is_named(numbered: Numbered):
    """It counts as one damaged record, though a hundred are lost. Later listings say nothing again."""
    shards = numbered.write([100, 100, 100])
    shards[1].write_bytes(bytes(range(256)) * 20)
    options: dict[str, Any] = {"on_corrupt": "skip_record", "refresh": "epoch", "epochs": 3}
    with (
        warnings.catch_warnings(record=True) as warned,
        numbered.loader(shards, **options) as loader,
    ):
        assert sum(len(batch["id"]) for batch in loader) == 600
        assert len(loader.statistics().damages) == 1
    (warning,) = warned
    assert f"no record can be read from 1 of 3 shards: {shards[1]}; the first damage:" in str(warning.message)


def test_a_shard_that_changes_is_noticed(numbered: Numbered):
    shards = numbered.write([5000])
    with numbered.loader(shards, batch_size=20, index_cache="none") as loader:
        shards[0].write_bytes(b"")
        with pytest.raises(ShardReadError, match=r"changed while it was in use: expected \d+ bytes, written 20\d\d-"):
            next(iter(loader))


def test_records_that_do_not_fit(numbered: Numbered):
    shards = numbered.write([10])
    schema = loaderd.Schema({"bits": loaderd.PackedBits(64)}, {"bits": loaderd.Packed("bits")})
    with pytest.raises(RecordMismatchError) as caught:
        loaderd.Loader(shards, schema, batch_size=5, workers=1)
    mismatch = f"{shards[0]}: record 0 at byte 0: expected feature 'bits' of 8 bytes, found 4 bytes"
    assert caught.value.message == mismatch
    with pytest.raises(RecordMismatchError) as caught:
        loaderd.Loader(shards, schema, batch_size=5, workers=1, on_corrupt="skip_record")
    assert caught.value.message == f"no record of the only block fits the schema; the first of them: {mismatch}"


def test_a_first_record_that_does_not_fit_is_left_out_as_any_other(numbered: Numbered):
    """Here all of the first shard: the schema is not wrong, for others fit it."""
    shards = numbered.write([30, 30, 30])
    shards[0].write_bytes(30 * framed(b""))
    options = {"batch_size": 10, "workers": 1}
    with pytest.raises(RecordMismatchError, match="record 0 at byte 0"):
        numbered.loader(shards, **options)
    with numbered.loader(shards, on_corrupt="skip_any", **options) as loader:
        assert sorted(numbered.records(loader)) == list(range(30, 90))
        assert loader.statistics().records_skipped == 30


def test_feature_lists_are_not_passed_over_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of a SequenceExample. What ``framed`` holds is TensorFlow's: {"id": [n]}, and lists "moves" and "times"."""

    def entry(name: bytes, value: bytes) -> bytes:
        return field(0x0A, field(0x0A, name) + field(0x12, value))

    def record(number: int) -> bytes:
        feature = field(0x1A, field(0x0A, bytes([number])))
        lists = entry(b"moves", field(0x0A, feature)) + entry(b"times", b"")
        return framed(field(0x0A, entry(b"id", feature)) + field(0x12, lists))

    (tmp_path / "games.tfrecord").write_bytes(b"".join(map(record, range(20))))
    schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
    with loaderd.Loader(tmp_path / "games.tfrecord", schema, batch_size=10, workers=1) as loader:
        assert sorted(number for _ in range(2) for batch in loader for number in batch["id"]) == sorted(
            2 * [*range(20)]
        )
    assert [one.getMessage() for one in caplog.records] == [
        "the records are tf.train.SequenceExamples. Their context is read; their feature_lists are not: moves, times"
    ]
    for moves in (loaderd.Int64(), loaderd.Int64(default=0)):
        schema = loaderd.Schema({"moves": moves}, {"moves": loaderd.Array("moves")})
        with pytest.raises(
            RecordMismatchError, match="expected feature 'moves', found 'moves' in the record's feature_l"
        ):
            loaderd.Loader(tmp_path / "games.tfrecord", schema, batch_size=10, workers=1)


def test_a_function_that_fails_names_its_field(numbered: Numbered):
    shards = numbered.write([100])
    schema = loaderd.Schema(
        {"id": loaderd.Int64()},
        {"id": loaderd.Array("id"), "bad": loaderd.Derived(lambda n: 1 // (n - 50).all(), "id", (), "int8")},
    )
    with (
        loaderd.Loader(shards, schema, batch_size=10, shuffle=False, workers=1) as loader,
        pytest.raises(WorkerError, match="derived field 'bad'"),
    ):
        list(loader)


def test_bad_arguments(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([10])

    def make(**options: object) -> None:
        loaderd.Loader(**{"shards": shards, "schema": numbered.schema, "batch_size": 5, **options})  # type: ignore[arg-type]

    for options, error, text in (
        ({"shuffle": 5}, OptionError, "shuffle must be True, False or loaderd.Shuffle, got 5\n.*window_records=5"),
        ({"remainder": "keep"}, OptionError, 'remainder must be "drop", "short" or "carry", got .keep.'),
        (
            {"on_corrupt": "ignore"},
            OptionError,
            'on_corrupt must be "raise", "skip_record", "skip_shard" or "skip_any"',
        ),
        ({"schema": "chess_eval"}, OptionError, "schema must be a loaderd.Schema, got 'chess_eval'"),
        ({"schema": None}, OptionError, "schema must be a loaderd.Schema, got None\n.*loaderd inspect"),
        ({"schema": np.dtype("u1,u2")}, OptionError, r"of_stored\(loaderd.FixedRecords\(dtype\)\)"),
        ({"schema": loaderd.FixedRecords("u1,u2")}, OptionError, r"schema must .*\n.*Schema.of_stored\(records\)"),
        ({"where": len}, OptionError, r"where must be a loaderd.Derived .*\nDerived\(lambda"),
        ({"refresh": "epochs"}, OptionError, 'refresh must be "never" or "epoch", got .epochs.'),
        ({"index_cache": "usr"}, OptionError, 'index_cache must be "user", .* got .usr.\nA new folder here is ./usr'),
        ({"shards": str(tmp_path / "*.nothing")}, NoShardsError, "matches no file"),
        ({"shards": str(tmp_path)}, NoShardsError, "is a folder"),
        ({"shards": []}, NoShardsError, "at least one file"),
        ({"shards": [shards[0], shards[0]]}, OptionError, "twice"),
    ):
        with pytest.raises(error, match=text):
            make(**options)
    with pytest.raises(SchemaError, match="needs bits 30…33 of feature 'bits', which has 32"):
        loaderd.Schema({"bits": loaderd.PackedBits(32)}, {"x": loaderd.Bits("bits", start=30, shape=(4,))})
    (tmp_path / "empty.tfrecord").touch()
    with pytest.raises(NoShardsError, match=r"no record can be read from 1 shard, such as /.*\n"):
        make(shards=str(tmp_path / "empty.tfrecord"))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_without_records_does_not_come(numbered: Numbered, ahead: int):
    """Here batches 2 and 3, and the last one."""
    shards = numbered.write([20, 20, 25, 15])
    shards[1].write_bytes(20 * framed(b""))
    shards[3].write_bytes(15 * framed(b""))
    with numbered.loader(shards, shuffle=False, on_corrupt="skip_any", remainder="short") as loader:
        batches = numbered.batches(loader._iterate(ahead=ahead))
        assert batches == [list(range(first, first + 10)) for first in (0, 10, 40, 50)] + [[*range(60, 65)]]
        assert loader.statistics().records_skipped == 35
        assert (loader.position.epoch, loader.position.batch) == (1, 0), "the last batch is behind us, too"
        with pytest.raises(EmptyBatchError, match="none of the 10 records of batch 2 is left"):
            loader._fetch(Pass(0, 1), 2)
