"""The command ``loaderd``. Each subcommand is a module of this folder, which adds itself to the parser."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import loaderd
from loaderd.cli.standard_output import with_output
from loaderd.redaction import readable

COMMANDS = ("convert", "doctor", "index", "inspect", "serve", "status", "top", "verify")


class _Parser(argparse.ArgumentParser):
    """Its errors quote what was typed, which may be a URI; the parsers of the commands are of the same class."""

    def error(self, message: str) -> NoReturn:
        super().error(readable(message))


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """A parser of these commands. Each sets ``run``, a function of the options that returns the exit status."""
    result = _Parser(
        prog="loaderd", description="Batches for TensorFlow, PyTorch and JAX from shards of packed records."
    )
    result.add_argument("--version", action="version", version=f"loaderd {loaderd.__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        importlib.import_module(f"loaderd.cli.{name}").add_to(commands)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(with_output(lambda: _run(words)))


def _run(words: Sequence[str]) -> int:
    # The modules of the other commands are not imported: that would take half of the time until a server starts.
    asked_for = [name for name in COMMANDS if name in words[:1]]
    options = parser(asked_for or COMMANDS).parse_args(words)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        status = 130
    return status
