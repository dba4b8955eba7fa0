"""The Trainer of transformers, in one process and in two, resumes in any epoch with the same order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lent_batches import RECORDS, Write

pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
pytest.importorskip("transformers", reason="transformers is not installed: make test-torch")

EPOCHS = 3

PROGRAM = """
import loaderd, loaderd_torch, torch
from accelerate.data_loader import DataLoaderShard
from loaderd.errors import OptionError
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, id):
        self.seen.append(id.tolist())
        return {"loss": self.layer(id[:, None].float()).mean() * 1e-9}


def train(trainer_of, resume=None):
    arguments = TrainingArguments(
        f"{folder}/run", use_cpu=True, num_train_epochs=3, save_steps=1, save_strategy="no" if resume else "steps",
        report_to=[], disable_tqdm=True, logging_steps=1000,
    )
    shard = loaderd_torch.shard()
    with loaderd.Loader(f"{folder}/shards/*", schema, batch_size=16, shard=shard, workers=1) as loader:
        net = Net()
        trainer_of(net, arguments, loaderd_torch.batches(loader)).train(resume_from_checkpoint=resume)
    return net.seen


def returning(get):
    class Own(Trainer):
        def get_train_dataloader(self):
            return get(self)

    return lambda net, arguments, batches: Own(net, arguments, train_dataset=batches)


def refused(trainer_of, resume=None):
    try:
        train(trainer_of, resume=resume)
    except (OptionError, AttributeError) as error:
        return str(error)
    raise AssertionError("it is not refused")


by_shard = returning(lambda trainer: DataLoaderShard(trainer.train_dataset, batch_size=None))
whole = train(by_shard)
of_an_epoch = len(whole) // 3
for step in (2, of_an_epoch, of_an_epoch + 3, 2 * of_an_epoch + 1):
    rest = train(by_shard, resume=f"{folder}/run/checkpoint-{step}")
    assert rest == whole[step:], (step, rest, whole)
bare = returning(lambda trainer: trainer.train_dataset)
prepared = returning(lambda trainer: trainer.accelerator.prepare(DataLoader(trainer.train_dataset, batch_size=None)))
plain = returning(lambda trainer: DataLoader(trainer.train_dataset, batch_size=None))
middle = f"{folder}/run/checkpoint-{of_an_epoch + 3}"
alone = int(os.environ["WORLD_SIZE"]) == 1
report({
    "seen": whole,
    "default": refused(lambda net, arguments, batches: Trainer(net, arguments, train_dataset=batches)),
    "bare": refused(bare, middle),
    "plain": refused(plain, middle),
    "prepared": train(prepared, resume=middle) == whole[of_an_epoch + 3 :] if alone else refused(prepared),
})
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_resumes_exactly_or_is_refused(
    tmp_path: Path, write_numbered_to: Write, run_ranks: Callable[..., list[Any]], num_processes: int
):
    """At the end of an epoch and in the middle of each, from checkpoints that hold nothing of the data."""
    write_numbered_to(tmp_path / "shards", [100, 50])
    reports = run_ranks(PROGRAM, num_processes)
    steps = [report["seen"] for report in reports]
    of_an_epoch = len(steps[0]) // EPOCHS
    for epoch in range(EPOCHS):
        part = slice(epoch * of_an_epoch, (epoch + 1) * of_an_epoch)
        assert sorted(itertools.chain(*(ids for seen in steps for ids in seen[part]))) == list(range(RECORDS))
    lost = "its loader has one of 2 shares: the records of the others would never be seen"
    for report in reports:
        assert (lost if num_processes == 2 else "batch_size of the DataLoader must be None") in report["default"]
        assert "get_train_dataloader(self) returns it" in report["default"]
        assert "no attribute 'dataset': to skip batches, and so to resume" in report["bare"]
        assert "3 batches would be skipped of an epoch that nobody has named" in report["plain"]
        assert report["prepared"] is True if num_processes == 1 else lost in report["prepared"]
