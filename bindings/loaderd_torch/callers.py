"""Refuses to give batches to code that would lose records, or give a training some of them twice, in silence.

Trainers put a data set into a DataLoader, and that into wrappers of their own, which batch again, divide the batches
among processes, or skip some. They tell the data set none of this. But when an iteration begins, or when they set the
epoch, methods of these objects are running, and the objects know.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from loaderd.client.loader import Loader
from loaderd.errors import OptionError

_PLAIN = "Use DataLoader(batches, batch_size=None, num_workers=0); loaderd has workers of its own: Loader(workers=…)."
_SHARD = (
    "accelerate.data_loader.DataLoaderShard(batches, batch_size=None): your Trainer's get_train_dataloader(self) "
    "returns it, or your loop iterates over it, without accelerator.prepare"
)
HOW_TO_SKIP = f"to skip batches, and so to resume a Trainer of transformers, use {_SHARD}"


def worker_error(what: str = "num_workers of the DataLoader must be 0, got another") -> OptionError:
    """The error of batches that another process is to iterate over; ``what`` was seen of that."""
    return OptionError(
        f"{what}: the batches are in the memory of the process that made the loader, and each worker of a DataLoader "
        "would need a loader of its own",
        hint=_PLAIN,
    )


def check_callers(loader: Loader, epoch_is_set: bool) -> None:
    """Raise OptionError if the batches of the next iteration of ``loader`` would not all reach the training, once.

    ``epoch_is_set``: whether somebody has said which iteration that is.
    """
    if get_worker_info() is not None:
        raise worker_error()
    in_data_loader = False
    for caller in _callers():
        # By name, for isinstance() would have to import what defines them.
        kinds = {kind.__name__ for kind in type(caller).__mro__}
        in_data_loader |= isinstance(caller, DataLoader)
        if getattr(caller, "auto_collation", False):
            raise OptionError(
                "batch_size of the DataLoader must be None, got another: it would batch again what are batches",
                hint=f"{_PLAIN} With transformers, use {_SHARD}.",
            )
        if "DataLoaderDispatcher" in kinds and loader.shard[1] > 1:
            raise OptionError(
                "accelerate would divide the batches of process 0 among all processes, and its loader has one of "
                f"{loader.shard[1]} shares: the records of the others would never be seen",
                hint=f"Iterate over loaderd_torch.batches(loader, device=accelerator.device); or use {_SHARD}.",
            )
        if "IterableDatasetShard" in kinds:
            raise OptionError(
                "accelerate would have each process read all batches, and take a part of them",
                hint=f"Make the loader with shard=loaderd_torch.shard(), and use {_SHARD}.",
            )
        if kinds & _SKIPPING and caller.skip_batches > 0:
            _check_skip(loader, caller.skip_batches, epoch_is_set)
        if kinds & _CYCLES:
            _check_lightning(loader, in_data_loader, math.inf in (caller.limits or ()))


_SKIPPING = {"SkipDataLoader", "DataLoaderShard", "DataLoaderDispatcher"}
_CYCLES = {"_MaxSizeCycle", "_MinSize", "_MaxSize"}
"""How Lightning iterates in a training; "sequential" is for evaluations."""


def _check_skip(loader: Loader, batches: int, epoch_is_set: bool) -> None:
    if not loader._next_is_whole:
        here = loader._next_position
        raise OptionError(
            f"{batches} batches would be skipped, and the loader is behind them already: at batch {here.batch} of "
            f"epoch {here.epoch}",
            hint="Either load_state_dict() or start=, or skip_first_batches.",
        )
    if not epoch_is_set:
        raise OptionError(
            f"{batches} batches would be skipped of an epoch that nobody has named, which may be another one",
            hint=f"Use {_SHARD}; or call batches.set_epoch(epoch) before.",
        )


def _check_lightning(loader: Loader, in_data_loader: bool, without_limit: bool) -> None:
    if in_data_loader:
        raise OptionError(
            "Lightning does not set the epoch of a DataLoader's data set: a training that is resumed at the end of "
            "an epoch would begin again with the order of the first one",
            hint="Give Trainer.fit the batches themselves, in place of the DataLoader.",
        )
    if without_limit and not _has_length(loader):
        raise OptionError(
            "Lightning takes a batch ahead of batches without a length, and a checkpoint would miss it: got a loader "
            "without an end, or of data that grow",
            hint="Trainer(limit_train_batches=…), the number of batches of its epochs; or Loader(…, epochs=1).",
        )


def _has_length(loader: Loader) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True


_MODULES = ("torch.utils.data.", "torchdata.", "accelerate.", "lightning.", "pytorch_lightning.")


def _callers() -> Iterator[Any]:
    """The objects of those modules whose methods are running, the innermost first.

    Other frames are left alone: to ask a frame for its variables keeps their values alive, such as an earlier batch.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_MODULES) and "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back
