"""Compare loaderd with everything, the candidates of ``candidates/`` too: ``python bench/compare.py [SHARDS …]``."""

from __future__ import annotations

import argparse
import shlex
import sys

from loaderd.bench import command
from loaderd.bench.compare import CANDIDATES

ALTERNATIVES = (
    "mp_queue",
    "torch_dataloader",
    "grain_loader",
    "spdl_pipeline",
    "spdl_checked",
    "lczero",
    "loaderd_torch_batches",
    "loaderd_jax_batches",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=command.DESCRIPTION)
    command.add_arguments(parser, (*ALTERNATIVES, *CANDIDATES), "bench/results")
    sys.exit(command.run(parser.parse_args(), shlex.join(["python", *sys.argv])))
