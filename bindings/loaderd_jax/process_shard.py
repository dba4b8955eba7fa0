"""Which share of the data this process takes."""

from __future__ import annotations

import jax


def shard() -> tuple[int, int]:
    """This process's index and the number of processes, for ``loaderd.Loader(…, shard=loaderd_jax.shard())``.

    With several processes, call ``jax.distributed.initialize`` first: otherwise, as in a single one, this is (0, 1).
    """
    return jax.process_index(), jax.process_count()
