"""Runs a script of the example in a process that has been forked for it: TensorFlow is imported there already."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(script: Path, args: list[str], output: Path) -> None:
    """As ``python script args`` in a terminal: leader of a process group of its own, all it prints in ``output``."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
