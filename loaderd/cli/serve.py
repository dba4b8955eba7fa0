"""``loaderd serve``: data sets for several consumers, on this machine and on others."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loaderd import logs
from loaderd.errors import LoaderdError
from loaderd.remote.address import TOKEN_VARIABLE, default_socket_path
from loaderd.remote.security import read_token
from loaderd.server.settings import Address, ServerOptions, default_state_folder, parse_bytes
from loaderd.server.supervisor import Supervisor
from loaderd.server.unix_socket import make_private_folder
from loaderd.user_modules import add_working_directory

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Serve data sets to several consumers (loaderd.connect), each with a batch size and a position of its own. A data set
is an object in a Python module that can be imported, or is in the working directory: train = loaderd.Dataset(shards,
schema, …) in mypackage/datasets.py is named mypackage.datasets:train. SIGHUP imports the modules again, for groups
and for consumers that connect afterwards. SIGTERM or Ctrl-C tells the consumers, then ends the server; a second one
ends it at once."""


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("serve", help="serve data sets to several consumers", description=_DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("targets", nargs="+", metavar="MODULE:DATASET", help="such as mypackage.datasets:train")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="worker processes, shared by all consumers; default: chosen from the cores",
    )
    parser.add_argument(
        "--unix",
        metavar="PATH",
        help=f"the Unix socket, for consumers of this user on this machine; default: {default_socket_path()}",
    )
    _add_network(parser.add_argument_group("network"))
    _add_limits(parser.add_argument_group("limits"))
    _add_operation(parser.add_argument_group("operation"))


def _add_network(net: argparse._ArgumentGroup) -> None:
    net.add_argument("--listen", metavar="HOST:PORT", help="such as 0.0.0.0:8471; default: no network")
    net.add_argument("--tls-cert", metavar="FILE", help="PEM file: the server's certificate and the chain to its CA")
    net.add_argument("--tls-key", metavar="FILE", help="PEM file: the private key of --tls-cert")
    net.add_argument("--tls-client-ca", metavar="FILE", help="PEM file: consumers must show a certificate of this CA")
    net.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds the token that every consumer must show; default: the variable {TOKEN_VARIABLE}",
    )
    net.add_argument(
        "--makers",
        type=int,
        metavar="N",
        help="processes that make rows for consumers on other machines; default: as many as workers",
    )
    net.add_argument(
        "--cache",
        default="256MiB",
        metavar="BYTES",
        help="memory for answers that another consumer may ask for again; 0: none; default: %(default)s",
    )
    net.add_argument("--insecure", action="store_true", help="allow --listen beyond loopback without TLS or a token")


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--max-consumers",
        type=int,
        default=ServerOptions.max_consumers,
        metavar="N",
        help="connected at a time; default: %(default)s",
    )
    limits.add_argument(
        "--max-held-batches",
        type=int,
        default=ServerOptions.max_held_batches,
        metavar="N",
        help="the most that a consumer may ask to hold at a time (held_batches); default: %(default)s",
    )
    limits.add_argument(
        "--max-bandwidth",
        metavar="BYTES",
        help="a second, to all consumers on the network together, such as 100MB; default: no limit",
    )
    limits.add_argument(
        "--max-memory",
        metavar="BYTES",
        help="for the windows and batches of a consumer or group at the Unix socket, such as 2GiB; default: no limit",
    )
    limits.add_argument(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="disconnect a consumer that takes no batch for so many seconds; default: never",
    )


def _add_operation(operation: argparse._ArgumentGroup) -> None:
    operation.add_argument(
        "--health", metavar="HOST:PORT", help="serve /livez, /readyz, /healthz and /metrics over HTTP; default: off"
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
        help="replace a daemon or gateway that does not answer for so many seconds; default: %(default)g",
    )
    operation.add_argument(
        "--grace",
        type=float,
        default=ServerOptions.grace,
        metavar="S",
        help="when the server ends, kill processes that still run after so many seconds; default: %(default)g",
    )


def options_of(arguments: argparse.Namespace) -> ServerOptions:
    """The options, checked. Raises OptionError, and ServerError if the default socket's folder is another user's."""
    given = {name: value for name, value in vars(arguments).items() if name != "run"}
    for name in ("listen", "health"):
        if given[name] is not None:
            given[name] = Address.parse(given[name], f"--{name}")
    for name in ("max_bandwidth", "max_memory"):
        if given[name] is not None:
            given[name] = parse_bytes(given[name], f"--{name.replace('_', '-')}")
    given["cache"] = 0 if given["cache"] == "0" else parse_bytes(given["cache"], "--cache")
    given["token_file"] = os.path.abspath(arguments.token_file) if arguments.token_file else None
    given["token"] = read_token(arguments.token_file) if given["listen"] else None
    given["targets"] = tuple(arguments.targets)
    given["unix"] = os.path.abspath(arguments.unix or default_socket_path())
    given["state"] = os.path.abspath(arguments.state) if arguments.state else None
    options = ServerOptions(**given)
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
        supervisor = Supervisor(options)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if supervisor.run() else 1
