"""``loaderd serve``: data sets for several consumers, on this machine and on others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from loaderd import logs
from loaderd.errors import LoaderdError, OptionError
from loaderd.remote.address import TOKEN_VARIABLE, default_socket_path
from loaderd.serve.options import (
    Address,
    HttpOptions,
    ServerOptions,
    UnixOptions,
    default_state_folder,
    parse_bytes,
)
from loaderd.serve.supervisor import HttpSupervisor, UnixSupervisor
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


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("serve", help="serve data sets to several consumers", description=_DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("targets", nargs="+", metavar="MODULE:DATASET", help="such as mypackage.datasets:train")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read and unpack, or that answer requests; default: chosen from the cores",
    )
    parser.add_argument(
        "--unix",
        metavar="PATH",
        help=f"the Unix socket, for consumers of this user on this machine; default: {default_socket_path()}",
    )
    _add_unix(parser.add_argument_group("consumers of this machine (--unix)"))
    _add_network(parser.add_argument_group("consumers of other machines (--listen); needs the extra server"))
    _add_operation(parser.add_argument_group("operation"))


def _add_unix(unix: argparse._ArgumentGroup) -> None:
    unix.add_argument(
        "--max-consumers",
        type=int,
        metavar="N",
        help=f"connected at a time; default: {UnixOptions.max_consumers}",
    )
    unix.add_argument(
        "--max-held-batches",
        type=int,
        metavar="N",
        help="the most that a consumer may ask to hold at a time (held_batches); "
        f"default: {UnixOptions.max_held_batches}",
    )
    unix.add_argument(
        "--max-memory",
        metavar="BYTES",
        help="for the windows and batches of a consumer or group, such as 2GiB; default: no limit",
    )
    unix.add_argument(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="disconnect a consumer that takes no batch for so many seconds; default: never",
    )


def _add_network(net: argparse._ArgumentGroup) -> None:
    net.add_argument("--listen", metavar="HOST:PORT", help="such as 0.0.0.0:8471")
    net.add_argument("--tls-cert", metavar="FILE", help="PEM file: the server's certificate and the chain to its CA")
    net.add_argument("--tls-key", metavar="FILE", help="PEM file: the private key of --tls-cert")
    net.add_argument("--tls-client-ca", metavar="FILE", help="PEM file: consumers must show a certificate of this CA")
    net.add_argument(
        "--token-file",
        metavar="FILE",
        help="each line is a token, of which every consumer must show one; default: the variable " + TOKEN_VARIABLE,
    )
    net.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow --listen beyond loopback without TLS or a token",
    )
    net.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help=f"of each process, at a time; default: {HttpOptions.max_connections}",
    )
    net.add_argument(
        "--max-bandwidth",
        metavar="BYTES",
        help="a second, to all consumers together, such as 100MB; default: no limit",
    )


def _add_operation(operation: argparse._ArgumentGroup) -> None:
    operation.add_argument(
        "--health",
        metavar="HOST:PORT",
        help="serve /livez, /readyz and /metrics here, without a token; default: with --listen, there",
    )
    operation.add_argument(
        "--state",
        metavar="DIR",
        help="keeps the lists of shards, with which trainings go on after a restart; default: "
        + default_state_folder(),
    )
    operation.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default=ServerOptions.log_format,
        help="of the log, on standard error; default: %(default)s",
    )
    operation.add_argument(
        "--watchdog",
        type=float,
        default=ServerOptions.watchdog,
        metavar="S",
        help="replace a process that does not answer for so many seconds; default: %(default)g",
    )
    operation.add_argument(
        "--grace",
        type=float,
        default=ServerOptions.grace,
        metavar="S",
        help="when the server ends, kill processes that still run after so many seconds; default: %(default)g",
    )


def options_of(arguments: argparse.Namespace) -> UnixOptions | HttpOptions:
    """The options, checked. Raises OptionError, and ServerError if the default socket's folder is another user's."""
    values = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    if "listen" in values and "unix" in values:
        raise OptionError("--unix and --listen are two servers", hint="Start one of each.")
    cls = HttpOptions if "listen" in values else UnixOptions
    known = {each.name for each in fields(cls)}
    for name in values:
        if name not in known:
            other = "--unix" if cls is HttpOptions else "--listen"
            raise OptionError(f"--{name.replace('_', '-')} is for a server with {other}")
    for name in {"listen", "health"} & set(values):
        values[name] = Address.parse(values[name], f"--{name}")
    for name in {"max_bandwidth", "max_memory"} & set(values):
        values[name] = parse_bytes(values[name], f"--{name.replace('_', '-')}")
    for name in {"token_file", "tls_cert", "tls_key", "tls_client_ca", "state", "unix"} & set(values):
        values[name] = os.path.abspath(values[name])
    values["targets"] = tuple(arguments.targets)
    if cls is HttpOptions:
        return HttpOptions(**values)
    options = UnixOptions(**{"unix": default_socket_path(), **values})
    if arguments.unix is None and not os.environ.get("XDG_RUNTIME_DIR"):
        make_private_folder(Path(options.unix).parent)
    return options


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. The exit status: 0 after a signal; 1 if the server failed; 2 for wrong options."""
    try:
        options = options_of(arguments)
        for target in options.targets:
            add_working_directory(target)
        logs.configure(options.log_format, "supervisor")
        return 0 if _server_of(options)() else 1
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _server_of(options: UnixOptions | HttpOptions) -> Callable[[], bool]:
    """The function that serves; False: the server failed. Raises LoaderdError if it cannot listen."""
    try:
        return (UnixSupervisor(options) if isinstance(options, UnixOptions) else HttpSupervisor(options)).run
    except ImportError as error:
        option = "--health" if isinstance(options, UnixOptions) else "--listen"
        raise OptionError(f"{option} needs {error.name}: pip install 'loaderd[server]'") from None
