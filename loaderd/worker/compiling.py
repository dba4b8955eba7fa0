"""The compiled loops that nearly all workers run."""

from __future__ import annotations

import logging
import os

from loaderd.decode.compiled_bits import select_loop
from loaderd.decode.compiled_rows import PUT_LOOP
from loaderd.formats.compiled_crcs import SEAM_LOOP
from loaderd.formats.compiled_frames import WALK_LOOP
from loaderd.machine_code import compile_together
from loaderd.plan.compiled_places import MIX_LOOP

_logger = logging.getLogger("loaderd")
_CHESS_LANES, _FLOAT_BYTES = 24, 4


def compile_loops() -> None:
    """Compile them, so that forks of this process need not. Does nothing where nothing can be compiled."""
    kernels = os.environ.get("LOADERD_KERNELS", "")
    if kernels not in ("", "numpy", "compiled"):
        _logger.warning('LOADERD_KERNELS must be "numpy" or "compiled", got %r: it is ignored', kernels)
    compile_together(select_loop(_CHESS_LANES, _FLOAT_BYTES), MIX_LOOP, WALK_LOOP, SEAM_LOOP, PUT_LOOP)
