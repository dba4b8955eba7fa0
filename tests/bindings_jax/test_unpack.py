"""``unpack="device"`` in JAX makes what the workers make, bit for bit, on the default device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import loaderd
from loaderd.errors import OptionError
from loaderd.schema import Schema, packed_schema
from tests.helpers import boards, list_records
from tests.helpers.decoding import decoded, random_rows
from tests.helpers.device_program import READY_MADE
from tests.schema.any_schema import schemas

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-torch")
loaderd_jax = pytest.importorskip("loaderd_jax")
unpack = pytest.importorskip("loaderd_jax.unpack")


def check(schema: Schema) -> None:
    rows = random_rows(schema, 9)
    expected = decoded(schema, rows)
    packed = decoded(packed_schema(schema, for_device=True), rows)
    names = [name for name, spec in schema.specs.items() if spec.dtype.isnative]
    if not names:
        return
    unpacker = unpack.Unpacker(schema.device_program(), names)
    with jax.enable_x64(True):
        found = unpacker({name: jax.device_put(packed[name]) for name in unpacker.inputs})
    assert_same(found, expected, names)
    if all(unpack.can_be_in_block(packed[name].dtype) for name in unpacker.inputs):
        ((block, places),) = loaderd.Batch(packed)._blocks(unpacker.inputs)
        fields = tuple((name, 0, (at, packed[name].dtype, packed[name].shape)) for name, at in places.items())
        with jax.enable_x64(True):
            assert_same(unpacker.of_blocks([jax.device_put(block)], fields), expected, names)


def assert_same(found: Any, expected: Any, names: list[str]) -> None:
    for name in names:
        assert (found[name].shape, found[name].dtype) == (expected[name].shape, expected[name].dtype), name
        assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), name


@settings(max_examples=100, deadline=None)
@given(schemas())
def test_any_schema(schema: Schema):
    check(schema)


@pytest.mark.parametrize("schema", READY_MADE)
def test_ready_made_schemas(schema: Schema):
    check(schema)


@pytest.mark.parametrize("where", ["first", "another", "divided"])
def test_batches_are_those_of_the_workers(
    write_numbered: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch, where: str
):
    if where == "another":  # the two fields are two blocks
        monkeypatch.setattr("loaderd.client.batch._MOST_BETWEEN_BYTES", -1)
    features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
    fields = {
        "bits": loaderd.Bits("bits", shape=(4, 8), dtype="bfloat16"),
        "id": loaderd.Array("id", dtype="int32", wrap=True),
    }
    options: dict[str, Any] = {"batch_size": 64, "workers": 2, "epochs": 2, "remainder": "drop"}
    device = {"first": None, "another": jax.devices()[-1], "divided": None}[where]
    if where == "divided":
        device = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec("data"))
    shards, schema = write_numbered([1000, 300]), Schema(features, fields)
    with (
        loaderd.Loader(shards, schema, **options) as plain,
        loaderd.Loader(shards, schema, unpack="device", **options) as packed,
    ):
        expected = list(loaderd_jax.batches(plain, ("id", "bits")))
        found = list(loaderd_jax.batches(packed, ("id", "bits"), device=device))
    assert len(found) == len(expected) == 40
    for ours, theirs in zip(found, expected, strict=True):
        for array, other in zip(ours, theirs, strict=True):
            assert array.dtype == other.dtype and np.array_equal(array, other)
            assert where != "another" or array.devices() == {device}
            assert where != "divided" or array.sharding.is_equivalent_to(device, array.ndim)


def test_integers_that_jax_would_cut_off(write_numbered: Callable[..., list[Path]]):
    same = loaderd.Array("id", dtype="float32")
    schema = Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {"a": same, "b": same, "c": same})
    with (
        loaderd.Loader(write_numbered([100]), schema, batch_size=10, unpack="device", workers=1) as loader,
        pytest.raises(OptionError, match="'id' is int64, and JAX would make int32 of it"),
    ):
        loaderd_jax.batches(loader)


@pytest.mark.parametrize("where", ["worker", "device"])
def test_fields_of_boards(tmp_path: Path, where: Any):
    records = boards.boards(300)
    path = boards.write(tmp_path / "a.bin", records)
    with loaderd.Loader(path, boards.schema(), batch_size=64, unpack=where, workers=1) as loader:
        boards.check(loaderd_jax.batches(loader), records)


@pytest.mark.parametrize("unpack_where", ["worker", "device"])
def test_lists_and_their_lengths_are_arrays(tmp_path: Path, unpack_where: Any):
    shards = list_records.write(tmp_path)
    with loaderd.Loader(shards, list_records.SCHEMA, batch_size=60, unpack=unpack_where, workers=1) as loader:
        (batch,) = loaderd_jax.batches(loader)
    assert (batch["moves"].dtype, batch["n"].dtype) == ("int32", "int32")
    assert ((batch["moves"] == 0).sum(axis=1) == batch["n"]).all()
    assert sorted(batch["n"].tolist()) == sorted(list_records.LENGTHS)
