"""The compiled loops that nearly all workers run."""

from __future__ import annotations

from loaderd.decode.compiled_bits import select_loop
from loaderd.decode.compiled_rows import put_loop
from loaderd.plan.compiled_places import mix_loop
from loaderd.shards.compiled_crcs import seam_loop
from loaderd.shards.compiled_frames import walk_loop

_CHESS_LANES, _FLOAT_BYTES = 24, 4


def compile_loops() -> None:
    """Have them compiled, so that forks of this process need not; where nothing can be compiled, that is all."""
    select_loop(_CHESS_LANES, _FLOAT_BYTES)
    for loop in (mix_loop, walk_loop, seam_loop, put_loop):
        loop()
