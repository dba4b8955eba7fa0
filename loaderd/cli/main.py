"""The command ``loaderd``: one subcommand a module of this folder, which adds itself to the parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import loaderd
from loaderd.cli import bench, convert, dashboard, doctor, index, inspect, serve, status, top, verify


def parser() -> argparse.ArgumentParser:
    """All commands and their options. A command sets ``run``: from its options to the exit status."""
    result = argparse.ArgumentParser(
        prog="loaderd", description="Batches for TensorFlow, PyTorch and JAX from shards of packed records."
    )
    result.add_argument("--version", action="version", version=f"loaderd {loaderd.__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench.add_to(commands)
    convert.add_to(commands)
    dashboard.add_to(commands)
    doctor.add_to(commands)
    index.add_to(commands)
    inspect.add_to(commands)
    serve.add_to(commands)
    status.add_to(commands)
    top.add_to(commands)
    verify.add_to(commands)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
