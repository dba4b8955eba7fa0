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
from loaderd.server.settings import Address, ServerOptions, parse_bytes
from loaderd.server.supervisor import Supervisor
from loaderd.server.unix_socket import make_private_folder

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Serve data sets to several consumers (loaderd.connect), each with a batch size and a position of its own. A data set
is an object of a Python module that can be imported from here: train = loaderd.Dataset(shards, schema, …) in
mypackage/datasets.py is mypackage.datasets:train. SIGHUP: import everything anew, for the consumers that come then.
SIGTERM, Ctrl-C: tell the consumers, and end; a second time: at once."""


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("serve", help="serve data sets to several consumers", description=_DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("targets", nargs="+", metavar="MODULE:DATASET", help="such as mypackage.datasets:train")
    parser.add_argument("--workers", type=int, metavar="N", help="processes for all of them; default: of the cores")
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
    net.add_argument("--tls-cert", metavar="FILE", help="the server's certificate and what leads to its CA, PEM")
    net.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    net.add_argument("--tls-client-ca", metavar="FILE", help="ask clients for a certificate from this CA, PEM")
    net.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"what every consumer must show; default: the environment's {TOKEN_VARIABLE}",
    )
    net.add_argument(
        "--makers",
        type=int,
        metavar="N",
        help="processes that make rows for others; default: as many as workers",
    )
    net.add_argument(
        "--cache",
        default="256MiB",
        metavar="BYTES",
        help="memory for answers that others may ask for too; 0: none; default: %(default)s",
    )
    net.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS and a token")


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--max-consumers", type=int, default=ServerOptions.max_consumers, metavar="N", help="default: %(default)s"
    )
    limits.add_argument(
        "--max-held-batches",
        type=int,
        default=ServerOptions.max_held_batches,
        metavar="N",
        help="that a consumer may ask to hold at a time (held_batches); default: %(default)s",
    )
    limits.add_argument(
        "--max-bandwidth", metavar="BYTES", help="a second, to all on the network, such as 100MB; default: none"
    )
    limits.add_argument(
        "--max-memory",
        metavar="BYTES",
        help="of windows and batches, for a consumer at the Unix socket or a group of them; default: what there is",
    )
    limits.add_argument(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="part with consumers that leave their batches untaken for so long; default: never",
    )


def _add_operation(operation: argparse._ArgumentGroup) -> None:
    operation.add_argument(
        "--health", metavar="HOST:PORT", help="/livez, /readyz, /healthz and /metrics over HTTP; default: none"
    )
    operation.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default=ServerOptions.log_format,
        help="on standard error; default: %(default)s",
    )
    operation.add_argument(
        "--watchdog",
        type=float,
        default=ServerOptions.watchdog,
        metavar="S",
        help="replace a daemon or a gateway that says nothing for so long; default: %(default)g",
    )
    operation.add_argument(
        "--grace",
        type=float,
        default=ServerOptions.grace,
        metavar="S",
        help="for consumers to take note of the end; default: %(default)g",
    )


def options_of(arguments: argparse.Namespace) -> ServerOptions:
    """The options, checked; raises OptionError, and ServerError where the default place is somebody else's."""
    given = {name: value for name, value in vars(arguments).items() if name != "run"}
    for name in ("listen", "health"):
        if given[name] is not None:
            given[name] = Address.parse(given[name])
    for name in ("max_bandwidth", "max_memory"):
        if given[name] is not None:
            given[name] = parse_bytes(given[name])
    given["cache"] = 0 if given["cache"] == "0" else parse_bytes(given["cache"])
    given["token_file"] = os.path.abspath(arguments.token_file) if arguments.token_file else None
    given["token"] = read_token(arguments.token_file) if given["listen"] else None
    given["targets"] = tuple(arguments.targets)
    given["unix"] = os.path.abspath(arguments.unix or default_socket_path())
    options = ServerOptions(**given)
    if arguments.unix is None and not os.environ.get("XDG_RUNTIME_DIR"):
        make_private_folder(Path(options.unix).parent)
    return options


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. 0: a signal ended it; 1: it could not go on; 2: wrong options."""
    sys.path.insert(0, os.getcwd())
    try:
        options = options_of(arguments)
        logs.configure(options.log_format, "supervisor")
        supervisor = Supervisor(options)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if supervisor.run() else 1
