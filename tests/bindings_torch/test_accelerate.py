"""accelerate's loops, in two processes that each have a share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lent_batches import RECORDS, Write

pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-torch")

EPOCHS = 3

COMMON = """
import loaderd, loaderd_torch, torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from loaderd.errors import OptionError
from torch.utils.data import DataLoader

schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})


def make(**options):
    options = {"batch_size": 16, "shard": loaderd_torch.shard(), "workers": 1, **options}
    loader = loaderd.Loader(f"{folder}/shards/*", schema, **options)
    return loaderd_torch.batches(loader, {"id": "id"}, device="cpu")


def taken(batches, most=None):
    return [batch["id"].tolist() for _, batch in zip(range(most or 1000), batches)]


def refused(action):
    try:
        action()
    except (OptionError, AttributeError) as error:
        return str(error)
    raise AssertionError("it is not refused")


accelerator = Accelerator(cpu=True)
"""

LOOP = """
batches = make()
assert accelerator.prepare(batches) is batches
accelerator.register_for_checkpointing(batches)
epochs = []
for epoch in range(3):
    epochs.append(taken(batches))
    if epoch == 0:
        taken(batches, 3)
        accelerator.save_state(f"{folder}/state")
        batches.set_epoch(1)

again = Accelerator(cpu=True)
others = make()
again.register_for_checkpointing(others)
again.load_state(f"{folder}/state")
rest = taken(others)
assert rest == epochs[1][3:], (rest, epochs)
assert taken(others) == epochs[2]

shard = DataLoaderShard(make(), batch_size=None)
assert [taken(shard) for _ in range(2)] == epochs[:2], "it sets the epoch"
skipping = skip_first_batches(DataLoaderShard(make(), batch_size=None), 3)
skipping.set_epoch(1)
assert taken(skipping) == epochs[1][3:]
again.wait_for_everyone()
report(epochs)
again.end_training()
"""


def test_ranks_share_each_epoch_and_go_on(
    tmp_path: Path, write_numbered_to: Write, run_ranks: Callable[..., list[Any]]
):
    """From accelerate's checkpoint, and by skipping batches of an epoch that is set."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    for epochs in zip(*run_ranks(COMMON + LOOP, 2), strict=True):
        assert sorted(itertools.chain(*epochs[0], *epochs[1])) == list(range(RECORDS))


REFUSED = """
batches = make()
told = {"dispatched": refused(lambda: taken(accelerator.prepare(DataLoader(batches, batch_size=None))))}
by_all = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
told["by all"] = refused(lambda: taken(by_all.prepare(DataLoader(batches, batch_size=None))))
told["whole batches"] = refused(lambda: taken(skip_first_batches(batches, 3)))
told["no epoch"] = refused(lambda: taken(skip_first_batches(DataLoader(batches, batch_size=None), 3)))
batches.loader.load_state_dict(loaderd.Position(1, 3))
shard = DataLoaderShard(batches, batch_size=None)
told["another epoch"] = refused(lambda: taken(shard))
shard.set_epoch(1)
told["twice"] = refused(lambda: taken(skip_first_batches(shard, 3)))
assert taken(shard) == taken(make(start=loaderd.Position(1, 3))), "nothing was taken by what is refused"

whole = accelerator.prepare(DataLoader(make(shard=(0, 1), remainder="drop"), batch_size=None))
report([told, taken(whole)])
accelerator.end_training()
"""


def test_what_would_lose_records_is_refused(
    tmp_path: Path, write_numbered_to: Write, run_ranks: Callable[..., list[Any]]
):
    """In all processes, so that none waits for another. With one share, accelerate may divide the batches."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    reports = run_ranks(COMMON + REFUSED, 2)
    for told, _ in reports:
        assert "its loader has one of 2 shares: the records of the others would never be seen" in told["dispatched"]
        assert "DataLoaderShard(batches, batch_size=None)" in told["dispatched"]
        assert "accelerate would have each process read all batches" in told["by all"]
        assert "no attribute 'dataset': to skip batches" in told["whole batches"]
        assert "3 batches would be skipped of an epoch that nobody has named" in told["no epoch"]
        assert "iteration 0 is asked for" in told["another epoch"] and "its set_epoch(1)" in told["another epoch"]
        assert "is behind them already: at batch 3 of epoch 1" in told["twice"]
    seen = [list(itertools.chain(*taken)) for _, taken in reports]
    # accelerate joins the batches of two steps, and where only one is left, it adds some of the first ones.
    assert len(set(seen[0]) | set(seen[1])) == RECORDS // 16 * 16
