"""Batches as PyTorch's tensors: what they hold, how long, where; and how an iteration of them goes on."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import OptionError
from tests.helpers import slots
from tests.helpers.binding_contract import BatchesContract, Binding
from tests.helpers.lent_batches import BATCH_SIZE, CHECK_WARNING, RECORDS, Write, loader_fixtures
from tests.helpers.restarted import Restarted

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
loaderd_torch = pytest.importorskip("loaderd_torch")
pytree = torch.utils._pytree

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id"),
        **{dtype: loaderd.Array("id", dtype=dtype, wrap=True) for dtype in ("bool", *INTEGERS, *FLOATS, "complex64")},
    },
)


shards, shared_loader, loader = loader_fixtures(SCHEMA)


def saved(states: Any, folder: Path) -> Any:
    path = folder / "checkpoint.pt"
    torch.save(states, path)
    return torch.load(path, weights_only=True)


@pytest.fixture
def binding() -> Binding:
    """The "meta" device keeps shapes alone: so much can be seen without a GPU."""
    return Binding(
        loaderd_torch.batches,
        address=lambda tensor: tensor.data_ptr(),
        to_numpy=lambda tensor: np.array(tensor.tolist()),
        dtype_of=lambda dtype: getattr(torch, dtype.name),
        aliased={*SCHEMA.fields},
        host=torch.device("cpu"),
        device="meta",
        has_values=False,
        wrong_devices=[
            ("no such thing", "got 'no such thing'"),
            ("cuda:77", "got 'cuda:77'"),
            (3, "device must be text"),
        ],
        saved=saved,
    )


class TestContract(BatchesContract):
    """What the bindings for all libraries promise."""


def check(bits: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """That all rows are whole; returns their numbers."""
    numbers: list[int] = ids.tolist()
    assert (bits.double() @ 2.0 ** torch.arange(31, -1, -1).double()).tolist() == numbers
    return numbers


def lies_in_a_slot(tensor: torch.Tensor) -> bool:
    return slots.lies_in_a_slot(tensor.data_ptr())


# ------------------------------------------------------------------------------------ what there is


Pair = namedtuple("Pair", ["x", "y"])


def test_structures(loader: loaderd.Loader):
    first = next(iter(loaderd_torch.batches(loader, "id")))
    loader.load_state_dict(loaderd.Position())
    element = next(iter(loaderd_torch.batches(loader, Pair((("bits", "id"), "int8"), {"a": ("id",), "b": ["id"]}))))
    assert type(element) is Pair and type(element.y["a"]) is tuple and type(element.y["b"]) is list
    assert check(*element.x[0]) == first.tolist() == element.y["a"][0].tolist() == element.y["b"][0].tolist()
    assert element.x[1].dtype == torch.int8


def test_text_and_int4_are_left_out_or_refused(shards: list[Path]):
    fields = {
        "id": loaderd.Array("id"),
        "text": loaderd.Derived(lambda ids: np.array([b"%d" % i for i in ids], "S8"), "id", dtype="S8"),
        "int4": loaderd.Array("id", dtype="int4", wrap=True),
    }
    with loaderd.Loader(shards, loaderd.Schema({"id": loaderd.Int64()}, fields), batch_size=50, workers=1) as loader:
        for name in ("text", "int4"):
            with pytest.raises(OptionError, match=f"got field '{name}' of") as caught:
                loaderd_torch.batches(loader, ("id", name))
            assert "structure" in caught.value.hint
        seen = [number for ids in loaderd_torch.batches(loader, "id") for number in ids.tolist()]
        assert sorted(seen) == list(range(RECORDS))


def test_a_schema_takes_dtypes_of_pytorch(shards: list[Path]):
    fields = {name: loaderd.Bits("bits", shape=(32,), dtype=getattr(torch, name)) for name in ("float16", "bfloat16")}
    schema = loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, fields)
    with loaderd.Loader(shards, schema, batch_size=50, workers=1) as loader:
        for name, tensor in next(iter(loaderd_torch.batches(loader))).items():
            assert tensor.dtype == getattr(torch, name)
    with pytest.raises(loaderd.errors.SchemaError, match=r"dtype must be one that numpy .* got .*qint8"):
        loaderd.Array("id", dtype=torch.qint8)


# -------------------------------------------------------------------------------------- how long


def test_a_slot_comes_back_with_the_last_tensor(loader: loaderd.Loader):
    bits, ids = next(iter(loaderd_torch.batches(loader, ("bits", "id"))))
    weights = torch.ones(32, requires_grad=True)
    total = (bits * weights).sum()  # autograd keeps bits for the way back
    expected = bits.sum(0).clone()
    view, array = bits.view(-1)[5:], ids.numpy()
    del bits, ids
    assert loader.statistics().slots_lent == 1
    del view
    assert loader.statistics().slots_lent == 1
    del array
    assert loader.statistics().slots_lent == 1, "for autograd"
    total.backward()
    assert torch.equal(weights.grad, expected)
    assert loader.statistics().slots_lent == 0


def test_writing_in_place_changes_no_other_batch(loader: loaderd.Loader):
    seen = []
    for _ in range(4):
        for bits, ids in loaderd_torch.batches(loader, ("bits", "id")):
            seen += check(bits, ids)
            bits.mul_(-3).add_(7)
            ids.zero_()
    assert sorted(seen) == sorted([*range(RECORDS)] * 4)


# ------------------------------------------------------------------------------------- where it is


def test_the_epoch_can_be_set(loader: loaderd.Loader, shards: list[Path]):
    """Whatever came before, and also of a loader that has made no iteration yet."""
    batches = loaderd_torch.batches(loader, "id")
    epochs = [[ids.tolist() for ids in batches] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3, "each has an order of its own"
    with loaderd.Loader(shards, SCHEMA, batch_size=BATCH_SIZE, workers=1) as another:
        again = loaderd_torch.batches(another, "id")
        for epoch in (2, 0, 1, 1):
            again.set_epoch(epoch)
            assert [ids.tolist() for ids in again] == epochs[epoch]
        assert [ids.tolist() for ids in again] == epochs[2], "without it, one follows the other"
    with pytest.raises(OptionError, match="the number of an iteration must be an integer from 0 on, got -1"):
        batches.set_epoch(-1)


def test_setting_the_epoch_keeps_the_place_in_it(loader: loaderd.Loader):
    batches = loaderd_torch.batches(loader, "id")
    epochs = [[ids.tolist() for ids in batches] for _ in range(2)]
    loader.load_state_dict(loaderd.Position(1, 3))
    state = batches.state_dict()
    batches.set_epoch(1)
    assert [ids.tolist() for ids in batches] == epochs[1][3:]
    batches.load_state_dict(state)
    with pytest.raises(OptionError, match=r"iteration 0 is asked for, but .* iteration 1, at batch 3 of epoch 1"):
        batches.set_epoch(0)
    assert [ids.tolist() for ids in batches] == epochs[1][3:], "it is as it was"
    batches.set_epoch(0)
    assert [ids.tolist() for ids in batches] == epochs[0]
    batches.load_state_dict(state)
    batches.set_epoch(2)
    assert loader.next_position().epoch == 2, "a trainer may leave an epoch before its end"


def test_a_loaders_own_batch_is_a_pytree(loader: loaderd.Loader):
    batch = next(iter(loader))
    parts = pytree.tree_map(lambda array: array[:3].copy(), batch)
    assert type(parts) is loaderd.Batch and list(parts) == list(batch) and parts.num_records == 3
    assert all(np.array_equal(parts[name], batch[name][:3]) for name in batch)
    paths = [path for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert [pytree.keystr(path) for path in paths] == [f"[{name!r}]" for name in batch]
    del batch


# ------------------------------------------------------------------------------- training, a server


def test_of_a_server(tmp_path: Path, write_numbered_to: Write):
    """Alone, a consumer has slots without a copy; what several read is copied, for it may be written to."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    server = Restarted(tmp_path)
    try:
        for sharing in ("independent", "mirrored"):
            with server.connect(BATCH_SIZE, sharing=sharing) as loader:
                seen = []
                for bits, ids in loaderd_torch.batches(loader, ("bits", "id")):
                    assert lies_in_a_slot(bits) == (sharing == "independent")
                    seen += check(bits, ids)
                    bits.fill_(3)
                assert sorted(seen) == list(range(RECORDS))
    finally:
        server.kill()


# ------------------------------------------------------------------------------------------- ranks

RANK = """
import os, sys, torch.distributed as distributed, loaderd, loaderd_torch
rank, folder = int(sys.argv[1]), sys.argv[2]
assert loaderd_torch.shard() == (0, 1)
os.environ["WORLD_SIZE"] = "2"  # as launchers do
try:
    loaderd_torch.shard()
except loaderd.errors.OptionError as error:
    assert "must come after torch.distributed.init_process_group, got WORLD_SIZE=2" in str(error)
else:
    raise AssertionError
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
assert loaderd_torch.shard() == (rank, 2)
schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
with loaderd.Loader(f"{folder}/shards/*", schema, batch_size=16, shard=loaderd_torch.shard(), workers=1) as loader:
    print([number for ids in loaderd_torch.batches(loader, "id") for number in ids.tolist()])
name = "torch"
"""
END = """
distributed.destroy_process_group()
"""


def test_ranks_share_an_epoch(tmp_path: Path, write_numbered_to: Write, run_together: Any):
    """And are warned where nobody has said that they shall."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    program = sys.executable, "-c", RANK + CHECK_WARNING + END
    printed = run_together([[*program, str(rank), str(tmp_path)] for rank in range(2)])
    assert sorted(number for text in printed for number in eval(text.splitlines()[-1])) == list(range(RECORDS))
