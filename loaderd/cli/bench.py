"""``loaderd bench``: how much faster a user's own shards would load."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from loaderd.bench import command
from loaderd.bench.registry import CANDIDATES, specs_of

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "bench",
        help="compare loaderd with tf.data, on your shards or on synthetic ones",
        description=command.DESCRIPTION,
    )
    command.add_arguments(parser, specs_of(CANDIDATES), "loaderd-bench")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Call :func:`loaderd.bench.command.run`."""
    return command.run(options, shlex.join(["loaderd", *sys.argv[1:]]))
