"""``loaderd serve``: data sets for several consumers, on this machine and on others."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderd import logs
from loaderd.errors import LoaderdError, OptionError, install_hint
from loaderd.remote.address import TOKEN_VARIABLE, default_socket_path
from loaderd.serve.options import (
    Address,
    HttpOptions,
    ServerOptions,
    UnixOptions,
    default_state_folder,
    parse_bytes,
)
from loaderd.serve.unix_socket import make_private_folder
from loaderd.user_modules import add_working_directory

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Serve data sets to several consumers (loaderd.connect), each with a batch size and a position of its own. A data set
is an object in a Python module that can be imported, or is in the working directory: train = loaderd.Dataset(shards,
schema, …) in mypackage/datasets.py is named mypackage.datasets:train. With --unix (the default): batches in shared
memory for consumers of this machine. With --listen: packed records over HTTP for consumers of other machines, which
unpack them. SIGHUP imports the modules again, and lists the shards anew. SIGTERM or Ctrl-C ends the server."""
_EXAMPLE = "example: loaderd serve mypackage.datasets:train --workers 4"


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("serve", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    parser.add_argument("targets", nargs="+", metavar="MODULE:DATASET", help="such as mypackage.datasets:train")
    _add(parser, "--workers N", "processes that read and unpack, or that answer requests", int, "from the cores")
    _add(
        parser,
        "--unix PATH",
        "the Unix socket, for consumers of this user on this machine",
        default=default_socket_path(),
    )
    unix = parser.add_argument_group("consumers of this machine (--unix)")
    _add(unix, "--max-consumers N", "connected at a time", int, UnixOptions.max_consumers)
    _add(
        unix,
        "--max-held-batches N",
        "the most that a consumer may ask to hold at a time (held_batches)",
        int,
        UnixOptions.max_held_batches,
    )
    _add(unix, "--max-memory BYTES", "for the windows and batches of a consumer or group, such as 2GiB")
    _add(unix, "--idle-timeout S", "disconnect a consumer that takes no batch for so many seconds", float)
    network = parser.add_argument_group("consumers of other machines (--listen); needs the extra server")
    _add(network, "--listen HOST:PORT", "such as 0.0.0.0:8471")
    _add(network, "--tls-cert FILE", "PEM file: the server's certificate and the chain to its CA")
    _add(network, "--tls-key FILE", "PEM file: the private key of --tls-cert")
    _add(network, "--tls-client-ca FILE", "PEM file: consumers must show a certificate of this CA")
    tokens = "each line is a token, of which every consumer must show one"
    _add(network, "--token-file FILE", tokens, default=f"the variable {TOKEN_VARIABLE}")
    network.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow --listen beyond loopback without TLS or a token",
    )
    _add(network, "--max-connections N", "of each process, at a time", int, HttpOptions.max_connections)
    _add(network, "--max-bandwidth BYTES", "a second, to all consumers together, such as 100MB")
    operation = parser.add_argument_group("operation")
    pages = "serve /livez, /readyz and /metrics here, without a token"
    _add(operation, "--health HOST:PORT", pages, default="with --listen, there")
    state = "keeps the lists of shards, with which trainings go on after a restart"
    _add(operation, "--state DIR", state, default=default_state_folder())
    operation.add_argument(
        "--log-format", choices=logs.FORMATS, help=f"on standard error; default: {ServerOptions.log_format}"
    )
    hangs = "replace a process that does not answer for so many seconds"
    _add(operation, "--watchdog S", hangs, float, f"{ServerOptions.watchdog:g}")
    ends = "when the server ends, kill processes that still run after so many seconds"
    _add(operation, "--grace S", ends, float, f"{ServerOptions.grace:g}")


def _add(group: argparse._ActionsContainer, flag: str, text: str, kind: type = str, default: object = None) -> None:
    """An option that takes a value. ``default``: what the help says of it; the options themselves have it."""
    name, metavar = flag.split()
    of_default = "" if default is None else f"; default: {default}".replace("%", "%%")
    group.add_argument(name, metavar=metavar, type=kind, help=text + of_default)


def options_of(arguments: argparse.Namespace) -> UnixOptions | HttpOptions:
    """The options, checked. Raises OptionError, and ServerError if the default socket's folder is another user's."""
    values = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    if "listen" in values and "unix" in values:
        raise OptionError("--unix and --listen are two servers", hint="Start one of each.")
    cls = HttpOptions if "listen" in values else UnixOptions
    for name in values.keys() - {each.name for each in fields(cls)}:
        other = "--unix" if cls is HttpOptions else "--listen"
        raise OptionError(f"{_flag(name)} is for a server with {other}")
    values = {name: _converted(name, value) for name, value in values.items()}
    if cls is HttpOptions:
        return HttpOptions(**values)
    options = UnixOptions(**{"unix": default_socket_path(), **values})
    if arguments.unix is None and not os.environ.get("XDG_RUNTIME_DIR"):
        make_private_folder(Path(options.unix).parent)
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _converted(name: str, value: Any) -> Any:
    """The value of an option. Raises OptionError."""
    if name == "targets":
        return tuple(value)
    if name in ("listen", "health"):
        return Address.parse(value, _flag(name))
    if name in ("max_bandwidth", "max_memory"):
        return parse_bytes(value, _flag(name))
    if name in ("token_file", "tls_cert", "tls_key", "tls_client_ca", "state", "unix"):
        return os.path.abspath(value)
    return value


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. The exit status: 0 after a signal; 1 if the server failed; 2 for wrong options."""
    from loaderd.serve.supervisor import HttpSupervisor, UnixSupervisor

    try:
        options = options_of(arguments)
        for target in options.targets:
            add_working_directory(target)
        logs.configure(options.log_format, "supervisor")
        is_unix = isinstance(options, UnixOptions)
        server = UnixSupervisor(options) if isinstance(options, UnixOptions) else HttpSupervisor(options)
    except ModuleNotFoundError as error:
        needs = f"{'--health' if is_unix else '--listen'} needs {error.name}: {install_hint('server')}"
        sys.stderr.write(f"{needs}\n")
        return 2
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if server.run() else 1
