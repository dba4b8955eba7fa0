"""Which share of the data this process takes."""

from __future__ import annotations

import jax


def shard() -> tuple[int, int]:
    """This process's index and the number of processes, for ``loaderd.Loader(…, shard=loaderd_jax.shard())``.

    Of several processes, call ``jax.distributed.initialize`` first; else, and of a single one, it is (0, 1).
    """
    return jax.process_index(), jax.process_count()
