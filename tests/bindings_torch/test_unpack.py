"""``unpack="device"`` in PyTorch makes what the workers make, bit for bit, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import loaderd
from loaderd.schema import Array, PackedBits, Raw, Schema, Sparse, Spread, packed_schema
from tests.helpers import boards, list_records
from tests.helpers.decoding import decoded, random_rows
from tests.helpers.device_program import READY_MADE
from tests.schema.any_schema import schemas

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
loaderd_torch = pytest.importorskip("loaderd_torch")
dtypes, unpack = pytest.importorskip("loaderd_torch.dtypes"), pytest.importorskip("loaderd_torch.unpack")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here that PyTorch can use")


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check(schema: Schema, device: str = "cpu", compiler: Callable[[Any], Any] | None = None) -> None:
    rows = random_rows(schema, 9)
    expected = decoded(schema, rows)
    schema_of_packed = packed_schema(schema, for_device=True)
    packed = decoded(schema_of_packed, rows)
    names = [name for name, spec in schema.specs.items() if is_known(spec.dtype)]
    if not names:
        return
    unpacker = unpack.Unpacker(schema.device_program(), names, torch.device(device))
    run = unpacker if compiler is None else compiler(unpacker.__call__)
    ((block, offsets),) = loaderd.Batch(packed)._blocks(unpacker.inputs)
    read = unpack.BlockReader({name: schema_of_packed.specs[name] for name in unpacker.inputs})
    on_device = torch.from_numpy(block).to(device)
    found, storages = run(read(on_device, offsets, len(rows))), {storage_of(on_device)}
    for name in names:
        assert tuple(found[name].shape) == expected[name].shape, name
        assert found[name].dtype == dtypes.torch_dtype_of(expected[name].dtype), name
        assert bytes_of(found[name]) == expected[name].tobytes(), name
        assert found[name].is_contiguous(), name
        if compiler is None:  # whoever writes to one tensor changes no other, nor keeps the block
            assert found[name].numel() == 0 or storage_of(found[name]) not in storages, name
            storages.add(storage_of(found[name]))


def is_known(dtype: np.dtype[Any]) -> bool:
    try:
        dtypes.torch_dtype_of(dtype)
    except TypeError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(schemas())
def test_any_schema(schema: Schema):
    check(schema)


@pytest.mark.parametrize("schema", READY_MADE)
def test_ready_made_schemas(schema: Schema):
    check(schema)


def test_tensors_have_memory_of_their_own():
    features = {"r": Raw("uint8"), "w": Raw("int32"), "i": Raw("int64", (2,)), "b": PackedBits(64)}
    fields = {
        "spread": Spread("r", (1, 8, 8), 1 / 99),
        "cast": Spread("w", (2, 3)),
        "same": Array("i"),
        "wrapped": Array("i", dtype="uint64", wrap=True),
        "count": Sparse("b", 64, dtype="int64", count=True),
    }
    schema = Schema(features, fields)
    check(schema)


@settings(max_examples=100, deadline=None)
@given(schemas())
@needs_gpu
def test_any_schema_on_a_gpu(schema: Schema):
    check(schema, "cuda")


@needs_gpu
@pytest.mark.parametrize("schema", READY_MADE)
@pytest.mark.parametrize("compiles", [False, True])
def test_ready_made_schemas_on_a_gpu(schema: Schema, compiles: bool):
    check(schema, "cuda", torch.compile if compiles else None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_those_of_the_workers(
    write_numbered: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch, device: str, shuffle: bool
):
    if shuffle:  # the two fields are two blocks
        monkeypatch.setattr("loaderd.client.batch._MOST_BETWEEN_BYTES", -1)
    features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
    fields = {"bits": loaderd.Bits("bits", shape=(4, 8), dtype="bfloat16"), "id": loaderd.Array("id")}
    options: dict[str, Any] = {"batch_size": 64, "shuffle": shuffle, "workers": 2, "epochs": 2}
    shards, schema = write_numbered([1000, 300]), Schema(features, fields)
    with (
        loaderd.Loader(shards, schema, **options) as plain,
        loaderd.Loader(shards, schema, unpack="device", **options) as packed,
    ):
        assert next(iter(packed))["bits (stored)"].shape == (64, 4)
        packed.load_state_dict(loaderd.Position())
        expected = list(loaderd_torch.batches(plain, ("id", "bits")))
        found = list(loaderd_torch.batches(packed, ("id", "bits"), device=device))
    assert len(found) == len(expected) == 42
    for ours, theirs in zip(found, expected, strict=True):
        for tensor, other in zip(ours, theirs, strict=True):
            assert tensor.device.type == device and tensor.dtype == other.dtype and torch.equal(tensor.cpu(), other)


@pytest.mark.parametrize("where", ["worker", "device"])
def test_fields_of_boards(tmp_path: Path, where: Any):
    records = boards.boards(300)
    path = boards.write(tmp_path / "a.bin", records)
    with loaderd.Loader(path, boards.schema(), batch_size=64, unpack=where, workers=1) as loader:
        boards.check(loaderd_torch.batches(loader), records)


@pytest.mark.parametrize("unpack_where", ["worker", "device"])
def test_lists_and_their_lengths_are_tensors(tmp_path: Path, unpack_where: Any):
    shards = list_records.write(tmp_path)
    with loaderd.Loader(shards, list_records.SCHEMA, batch_size=60, unpack=unpack_where, workers=1) as loader:
        (batch,) = loaderd_torch.batches(loader)
    assert (batch["moves"].dtype, batch["n"].dtype) == (torch.int32, torch.int32)
    assert torch.equal((batch["moves"] == 0).sum(dim=1), batch["n"])
    assert sorted(batch["n"].tolist()) == sorted(list_records.LENGTHS)
