"""The command ``loaderd``. Each subcommand is a module of this folder, which adds itself to the parser."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import loaderd
from loaderd.cli.standard_output import with_output
from loaderd.redaction import readable

_GROUPS = {
    "look at data": {
        "inspect": "show what is in a shard, or print a schema for it",
        "verify": "check every record of shards, and name all damage",
        "index": "make the indexes of shards before a training needs them",
        "convert": "convert shards to another format",
    },
    "train": {
        "doctor": "what a training waits for, and what would help",
        "top": "all running loaders, live",
    },
    "serve": {
        "serve": "serve data sets to several consumers",
        "status": "a server's data sets and consumers, and who waits",
    },
}
COMMANDS = tuple(name for group in _GROUPS.values() for name in group)


class _Parser(argparse.ArgumentParser):
    """Its errors quote what was typed, which may be a URI; the parsers of the commands are of the same class."""

    def error(self, message: str) -> NoReturn:
        super().error(readable(message))


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """A parser of these commands. Each sets ``run``, a function of the options that returns the exit status."""
    result = _Parser(
        prog="loaderd",
        usage="loaderd [-h] [--version] COMMAND …",
        description="Batches for TensorFlow, PyTorch and JAX from shards of packed records.",
        epilog="`loaderd COMMAND --help` shows its options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=f"loaderd {loaderd.__version__}")
    for title, group in _GROUPS.items():
        result.add_argument_group(title, "\n".join(f"{name:9}{what}" for name, what in group.items()))
    commands = result.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="loaderd", required=True)
    for name in names:
        importlib.import_module(f"loaderd.cli.{name}").add_to(commands)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(with_output(lambda: _run(words)))


def _run(words: Sequence[str]) -> int:
    words = words or ["help"]
    if words[0] == "help":
        words = [*(word for word in words[1:2] if word != "help"), "--help"]
    name = words[0]
    # The modules of the other commands are not imported: that would take half of the time until a server starts.
    asked = parser([name] if name in COMMANDS else [])
    if name not in COMMANDS and not name.startswith("-"):
        near = [f"; did you mean {each}?" for each in get_close_matches(name, ["help", *COMMANDS], 1)]
        asked.error(f"there is no command {name!r}{''.join(near)}")
    options = asked.parse_args(words)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        status = 130
    return status
