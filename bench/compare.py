"""Compare loaderd with all candidates of ``competitors.py``: ``python bench/compare.py [SHARDS …]``."""

from __future__ import annotations

import argparse
import shlex
import sys

from competitors import CANDIDATES

from loaderd.bench import command
from loaderd.bench.registry import specs_of

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=command.DESCRIPTION)
    command.add_arguments(parser, specs_of(CANDIDATES), "bench/results")
    sys.exit(command.run(parser.parse_args(), shlex.join(["python", *sys.argv])))
