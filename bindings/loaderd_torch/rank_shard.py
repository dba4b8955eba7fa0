"""Which share of the data this process takes."""

from __future__ import annotations

import torch.distributed as distributed


def shard() -> tuple[int, int]:
    """This process's rank and the number of processes, for ``loaderd.Loader(…, shard=loaderd_torch.shard())``.

    Call ``torch.distributed.init_process_group`` first: without it, this is (0, 1).
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
