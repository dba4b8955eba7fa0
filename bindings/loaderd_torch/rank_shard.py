"""Which share of the data this process takes."""

from __future__ import annotations

import os

import torch.distributed as distributed

from loaderd.errors import OptionError


def shard() -> tuple[int, int]:
    """This process's rank and the number of processes, for ``loaderd.Loader(…, shard=loaderd_torch.shard())``.

    Call ``torch.distributed.init_process_group`` first, or what does so: without it, this is (0, 1). Raises
    OptionError where a launcher has started several processes (``WORLD_SIZE`` in the environment) without that call.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError(
            "loaderd_torch.shard() must come after torch.distributed.init_process_group, got "
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} and no process group: all would train on the same records",
            hint="Make the loader after init_process_group, Accelerator() or TrainingArguments(…); with Lightning, "
            "in train_dataloader(self) of your module.",
        )
    return 0, 1
