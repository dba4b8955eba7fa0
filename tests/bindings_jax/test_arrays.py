"""Batches as JAX arrays: what they hold, how long, where; and how an iteration of them goes on."""

from __future__ import annotations

import gc
import itertools
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

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-torch")
loaderd_jax = pytest.importorskip("loaderd_jax")
jnp = jax.numpy
CPUS, GPUS = jax.devices("cpu"), [one for one in jax.devices() if one.platform == "gpu"]
jax.config.update("jax_default_device", CPUS[0])  # where there is a GPU, it would be that

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]
NARROW = ["bool", *INTEGERS, "bfloat16", "float16", "float32", "complex64"]
SMALL = ["float8_e4m3fn", "float8_e5m2", "int4"]
WIDE = ["int64", "uint64", "float64", "complex128"]
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id", dtype="int32"),
        **{dtype: loaderd.Array("id", dtype=dtype, wrap=True) for dtype in (*NARROW, *SMALL)},
    },
)


def settle() -> None:
    """Has JAX give back what it had let go of: a thread of its own may have just computed with it."""
    jnp.zeros(1).block_until_ready()
    gc.collect()
    jnp.zeros(1).block_until_ready()


def lent(loader: loaderd.Loader) -> int:
    """Slots that are lent, when all has been given back that JAX had let go of."""
    settle()
    return loader.statistics().slots_lent


shards, shared_loader, loader = loader_fixtures(SCHEMA, settle)


@pytest.fixture
def binding() -> Binding:
    must = "device must be a jax.Device, a jax.sharding.Sharding or None"
    return Binding(
        loaderd_jax.batches,
        address=lambda array: array.unsafe_buffer_pointer(),
        to_numpy=np.asarray,
        dtype_of=np.dtype,
        aliased={"bits", "id", *NARROW},
        host=CPUS[0],
        device=CPUS[1],
        has_values=True,
        wrong_devices=[("cuda:0", f"{must}, got 'cuda:0'")],
        settle=settle,
    )


class TestContract(BatchesContract):
    """What the bindings for all libraries promise."""


def check(bits: jax.Array, ids: jax.Array) -> list[int]:
    """That all rows are whole; returns their numbers."""
    numbers: list[int] = ids.tolist()
    assert (np.asarray(bits) @ 2.0 ** np.arange(31, -1, -1)).tolist() == numbers
    return numbers


def lies_in_a_slot(array: jax.Array) -> bool:
    return slots.lies_in_a_slot(array.unsafe_buffer_pointer())


# ------------------------------------------------------------------------------------ what there is


Pair = namedtuple("Pair", ["x", "y"])


def test_structures(loader: loaderd.Loader):
    structure = Pair((("bits", "id"), "int8"), {"a": ("id",), "b": ["id"]})
    element = next(iter(loaderd_jax.batches(loader, structure)))
    assert jax.tree.structure(element) == jax.tree.structure(structure)
    assert check(*element.x[0]) == element.y["a"][0].tolist() == element.y["b"][0].tolist()


def test_what_jax_would_change_is_refused(shards: list[Path]):
    """Without x64, JAX keeps the lower half of an int64; with it, all of it, where it lies."""
    fields = {
        "text": loaderd.Derived(lambda ids: np.array([b"%d" % i for i in ids], "S8"), "int64", dtype="S8"),
        **{dtype: loaderd.Array("id", dtype=dtype) for dtype in WIDE},
    }
    with loaderd.Loader(shards, loaderd.Schema({"id": loaderd.Int64()}, fields), batch_size=50, workers=1) as loader:
        for name in WIDE:
            with pytest.raises(OptionError, match=f"field '{name}' is {name}, and JAX would make") as caught:
                loaderd_jax.batches(loader, name)
            assert "jax_enable_x64" in caught.value.hint
        with pytest.raises(OptionError, match="dtypes that JAX has, got field 'text'"):
            loaderd_jax.batches(loader)
        with jax.enable_x64(True):
            for element in loaderd_jax.batches(loader, WIDE):
                assert [array.dtype.name for array in element] == WIDE and all(map(lies_in_a_slot, element))
                assert element[0].tolist() == element[3].real.tolist()


# -------------------------------------------------------------------------------------- how long


def test_a_slot_comes_back_with_the_last_array(loader: loaderd.Loader):
    bits, ids = next(iter(loaderd_jax.batches(loader, ("bits", "id"))))
    array = np.asarray(ids)
    assert lent(loader) == 1 and not array.flags.writeable
    del bits
    assert lent(loader) == 1
    del ids
    assert lent(loader) == 1
    del array
    assert lent(loader) == 0


@jax.jit
def _slow(bits: jax.Array) -> jax.Array:
    """Some milliseconds of work, which at its end reads what it was given once more."""
    busy = jax.lax.fori_loop(0, 30, lambda _, x: jnp.sin(x @ x), jnp.ones((100, 100)) + bits.sum() * 1e-6)
    return bits * jnp.where(busy.sum() > 1e9, 2.0, 1.0)


def test_what_is_computed_later_reads_the_batch_of_then(loader: loaderd.Loader):
    """JAX computes while Python goes on to the next batches, and has let go of this one."""
    results: list[tuple[jax.Array, np.ndarray]] = []
    for _ in range(5):
        for bits, ids in loaderd_jax.batches(loader, ("bits", "id")):
            results.append((_slow(bits), np.array(ids)))
    del bits, ids
    for bits, ids in results:
        assert check(bits, ids)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_is_donated_is_not_written_to(loader: loaderd.Loader):
    """JAX would put a result where a donated argument lies: but not into memory that is not its own."""
    double = jax.jit(lambda bits, ids: (bits * 2, ids + 1), donate_argnums=(0, 1))
    same = jax.jit(lambda bits, ids: (bits, ids), donate_argnums=(0, 1))
    batches = iter(loader._iterate(lambda batch: lambda: batch))
    for function in (double, same):
        batch = next(batches)
        before = batch["bits"].copy(), batch["id"].copy()
        arrays = [jax.device_put(batch[name], may_alias=True) for name in ("bits", "id")]  # as loaderd_jax does
        assert all(map(lies_in_a_slot, arrays))
        results = function(*arrays)
        assert all(array.is_deleted() for array in arrays) and not any(map(lies_in_a_slot, results))
        assert np.array_equal(batch["bits"], before[0]) and np.array_equal(batch["id"], before[1])
    kept = []
    for _ in range(4):
        for bits, ids in loaderd_jax.batches(loader, ("bits", "id")):
            numbers = check(bits, ids)
            kept.append((same(bits, ids), numbers))
    assert all(check(*element) == numbers for element, numbers in kept)
    del bits, ids, batch


# ------------------------------------------------------------------------------------- where it is


def test_a_state_goes_through_orbax(loader: loaderd.Loader, tmp_path: Path):
    """Which keeps arrays and numbers alone, in a checkpoint like that of the weights."""
    orbax = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed: make test-torch")
    batches = loaderd_jax.batches(loader, "id")
    weights = jnp.arange(3.0)
    with orbax.CheckpointManager(tmp_path / "checkpoints") as manager:
        for step, _ in enumerate(itertools.islice(batches, 3)):
            state = {"weights": weights, "data": batches.state_dict()}
            manager.save(step, args=orbax.args.StandardSave(state))
        manager.wait_until_finished()
        loader.load_state_dict(loaderd.Position())
        abstract = {"weights": weights, "data": batches.state_dict()}
        for target in ((), (abstract,)):
            restored = manager.restore(2, args=orbax.args.StandardRestore(*target))
            assert restored["weights"].tolist() == [0, 1, 2]
            batches.load_state_dict(restored["data"])
            assert loader.position.batch == 3
            assert loaderd.Position.from_json(bytes(restored["data"]["position"])) == loader.position
    assert state["data"]["position"].shape == abstract["data"]["position"].shape


def test_a_loaders_own_batch_is_a_pytree(loader: loaderd.Loader):
    """What is computed with one is one, wherever JAX takes it apart."""
    batch = next(iter(loader))
    narrow = loaderd.Batch({name: batch[name] for name in ("bits", "float32")})
    total, same = jax.jit(lambda batch: (batch["bits"].sum(), batch))(narrow)
    assert int(total) == batch["bits"].sum() and type(same) is loaderd.Batch and list(same) == ["bits", "float32"]
    grown, _ = jax.lax.scan(lambda batch, _: (jax.tree.map(lambda array: array + 1, batch), None), same, length=2)
    assert grown["float32"].tolist() == (batch["float32"] + 2).tolist()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    assert paths == [f"[{name!r}]" for name in batch]
    del batch, narrow, same


@pytest.mark.skipif(not GPUS, reason="there is no GPU here that JAX can use")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_copied_to_a_gpu(loader: loaderd.Loader, prefetch: int):
    """While it computes, and the loop drops its batches at once."""
    seen, busy = [], jnp.ones((4000, 4000), device=GPUS[0])
    for _ in range(5):
        for bits, ids in loaderd_jax.batches(loader, ("bits", "id"), device=GPUS[0], prefetch=prefetch):
            busy = busy @ busy / 4000
            assert bits.devices() == ids.devices() == {GPUS[0]}
            seen.append((bits * 1, ids * 1))
    assert sorted(number for element in seen for number in check(*element)) == sorted([*range(RECORDS)] * 5)


def test_batches_are_divided_by_a_sharding(shards: list[Path]):
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("data",), devices=CPUS), jax.sharding.PartitionSpec("data")
    )
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "remainder": "drop", "workers": 1}
    with loaderd.Loader(shards, SCHEMA, **options) as loader:
        seen = []
        for bits, ids in loaderd_jax.batches(loader, ("bits", "id"), device=sharding):
            assert bits.sharding == sharding and len(bits.addressable_shards[1].data) == BATCH_SIZE // 2
            seen += check(bits, ids)
        assert len(seen) == len(set(seen)) == 9 * BATCH_SIZE


def test_a_sharding_that_does_not_divide_the_batches_is_refused(shards: list[Path]):
    """At once, or in front of the short batch that it does not divide, which is not lost."""
    mesh = jax.make_mesh((2,), ("data",), devices=CPUS)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with loaderd.Loader(shards, SCHEMA, batch_size=15, workers=1) as loader:
        with pytest.raises(
            OptionError, match=r"divides field 'bits' of shape \(15, 32\), got NamedSharding"
        ) as caught:
            loaderd_jax.batches(loader, ("bits", "id"), device=sharding)
        assert "batch_size" in caught.value.hint
    with loaderd.Loader(shards, SCHEMA, batch_size=16, shard=(0, 2), workers=1) as loader:  # of 75 records
        batches = iter(loaderd_jax.batches(loader, "id", device=sharding, prefetch=0))
        assert [len(next(batches)) for _ in range(4)] == [16] * 4
        with pytest.raises(OptionError, match=r"divides field 'id' of shape \(11,\)") as caught:
            next(batches)
        assert 'remainder="drop"' in caught.value.hint and loader.position.batch == 4


# ------------------------------------------------------------------------------- training, a server


def test_of_a_server(tmp_path: Path, write_numbered_to: Write):
    """Even what several consumers read is not copied: JAX does not write to it. Donated, it stays as it is."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    double = jax.jit(lambda bits: bits * 2, donate_argnums=0)
    server = Restarted(tmp_path)
    try:
        for sharing in ("independent", "mirrored"):
            with jax.enable_x64(True), server.connect(BATCH_SIZE, sharing=sharing) as loader:
                seen = []
                for bits, ids in loaderd_jax.batches(loader, ("bits", "id")):
                    seen += check(bits, ids)
                    double(bits)
                assert sorted(seen) == list(range(RECORDS))
    finally:
        server.kill()


# ------------------------------------------------------------------------------------------- ranks

PROCESS = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import sys, jax, loaderd, loaderd_jax
index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
assert loaderd_jax.shard() == (index, 2)
schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id", dtype="int32")})
sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.P("data"))
options = {"batch_size": 14, "remainder": "drop", "shard": loaderd_jax.shard(), "workers": 1}
with loaderd.Loader(f"{folder}/shards/*", schema, **options) as loader:
    steps, total = [], jax.jit(lambda ids: ids.sum())
    for ids in loaderd_jax.batches(loader, "id", device=sharding):
        assert ids.shape == (28,)
        own = [number for shard in ids.addressable_shards for number in shard.data.tolist()]
        steps.append((int(total(ids)), own))
print(steps)
name = "jax"
"""


def test_processes_share_an_epoch(tmp_path: Path, write_numbered_to: Write, run_together: Any, free_port: int):
    """And each array is made of both processes' batches; they are warned where nobody has said that they shall."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    program = sys.executable, "-c", PROCESS + CHECK_WARNING
    printed = run_together([[*program, str(index), str(free_port), str(tmp_path)] for index in range(2)])
    steps = list(zip(*(eval(text.splitlines()[-1]) for text in printed), strict=True))
    assert len(steps) == 5
    for (total, own), (same_total, others) in steps:
        assert total == same_total == sum(own) + sum(others)
    seen = [number for step in steps for _, own in step for number in own]
    assert len(seen) == len(set(seen)) == 140 and set(seen) <= set(range(RECORDS))
