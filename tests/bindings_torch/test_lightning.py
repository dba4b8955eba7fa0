"""Lightning trains on batches, and resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import OptionError
from tests.helpers.lent_batches import BATCH_SIZE, NUM_BATCHES, RECORDS, Write

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
loaderd_torch = pytest.importorskip("loaderd_torch")
lightning = pytest.importorskip("lightning", reason="Lightning is not installed: make test-torch")
ModelCheckpoint = lightning.pytorch.callbacks.ModelCheckpoint
DataLoader = torch.utils.data.DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # Lightning warns of much that is meant

EPOCHS = 3
LIMITED = {"limit_train_batches": 7}


@pytest.fixture
def make_loader(tmp_path: Path, write_numbered_to: Write, numbered_schema: loaderd.Schema) -> Callable[..., Any]:
    shards = write_numbered_to(tmp_path / "shards", [100, 50])

    def make(**options: Any) -> loaderd.Loader:
        return loaderd.Loader(shards, numbered_schema, batch_size=BATCH_SIZE, workers=1, **options)

    return make


@pytest.fixture
def loader(make_loader: Callable[..., Any]) -> Iterator[loaderd.Loader]:
    with make_loader() as loader:
        yield loader


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen.append((self.current_epoch, batch["id"].tolist()))
        bits = batch["bits"]
        return self.layer(torch.tensor(bits) if isinstance(bits, np.ndarray) else bits).mean()

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated.append(batch["id"].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(batches: Any, validation: Any = None, *, resume: Path | None = None, **options: Any) -> Net:
    options = {"max_epochs": EPOCHS, "enable_checkpointing": False, **options}
    for quiet in ("logger", "enable_progress_bar", "enable_model_summary"):
        options[quiet] = False
    net = Net()
    trainer = lightning.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **options)
    trainer.fit(net, batches, validation, ckpt_path=resume)
    return net


def numbers(seen: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return sorted(number for at, ids in seen for number in ids if at == epoch)


@pytest.mark.parametrize(("epochs", "options"), [(1, {}), (1, LIMITED), (None, LIMITED)])
def test_goes_on_from_every_checkpoint(
    make_loader: Callable[..., Any], tmp_path: Path, epochs: int | None, options: dict[str, Any]
):
    """In the middle of an epoch, behind its last batch, and at its end: with exactly what comes without the break."""
    every_step = ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=1, save_top_k=-1)
    every_epoch = ModelCheckpoint(tmp_path / "epochs", "{step}", save_on_train_epoch_end=True, save_top_k=-1)
    with make_loader(epochs=epochs) as loader:
        batches = loaderd_torch.batches(loader)
        callbacks = [every_step, every_epoch]
        whole = fit(batches, callbacks=callbacks, **{**options, "enable_checkpointing": True}).seen
    of_an_epoch = options.get("limit_train_batches", NUM_BATCHES)
    assert [epoch for epoch, _ in whole] == [epoch for epoch in range(EPOCHS) for _ in range(of_an_epoch)]
    assert len({str(ids) for _, ids in whole}) == len(whole), "each epoch has its own order"
    if not options:
        assert all(numbers(whole, epoch) == list(range(RECORDS)) for epoch in range(EPOCHS))
    saved = [tmp_path / "epochs" / f"step={(epoch + 1) * of_an_epoch}.ckpt" for epoch in range(EPOCHS - 1)]
    steps = {*range(1, len(whole), 3), of_an_epoch, 2 * of_an_epoch}
    saved += [tmp_path / "steps" / f"step={step}.ckpt" for step in steps]
    for path in saved:
        with make_loader(epochs=epochs) as loader:
            rest = fit(loaderd_torch.batches(loader), resume=path, **options).seen
        assert rest == whole[int(path.stem.removeprefix("step=")) :], path


def test_a_data_loader_is_refused(loader: loaderd.Loader):
    """It has no epoch that Lightning could set. (Seen to repeat the order of epoch 0 in epoch 1.)"""
    with pytest.raises(OptionError, match="Lightning does not set the epoch of a DataLoader's data set") as caught:
        fit(DataLoader(loaderd_torch.batches(loader), batch_size=None))
    assert "Give Trainer.fit the batches themselves" in caught.value.hint


def test_what_lightning_would_take_ahead_is_refused(make_loader: Callable[..., Any]):
    with make_loader(epochs=None) as loader:
        with pytest.raises(OptionError, match="Lightning takes a batch ahead") as caught:
            fit(loaderd_torch.batches(loader), max_epochs=-1, max_steps=20)
        assert "limit_train_batches" in caught.value.hint


def test_a_loader_itself_gives_arrays(loader: loaderd.Loader):
    """Lightning makes each batch anew, as a mapping of the same type."""
    seen = fit(loader, max_epochs=1).seen
    assert numbers(seen, 0) == list(range(RECORDS))
