"""``loaderd status``: what a server serves, to whom, how fast, and who waits for whom."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loaderd.cli.durations import span
from loaderd.cli.parallel_scan import needs_rich, say
from loaderd.cli.server_access import access_of, add_access
from loaderd.client.connect import ask_status
from loaderd.errors import LoaderdError, OptionError
from loaderd.machine import in_mib
from loaderd.redaction import readable_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Report = Mapping[str, Any]

_INTERVAL_S = 1.0


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "status",
        help="a server's data sets and consumers, and who waits",
        description="Show a server on one screen: its data sets, its consumers, their rates, and who waits for whom. "
        "The exit status is 0, or 1 if the server does not answer.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "address",
        nargs="?",
        default="unix:",
        metavar="ADDRESS",
        help="unix:///PATH or grpc+tls://HOST:PORT; default: unix:, where this user's servers listen by default",
    )
    parser.add_argument("--json", action="store_true", help="all of it, as a JSON object")
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    add_access(parser)


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; or 1 if the server does not answer."""
    try:
        if arguments.watch and not sys.stdout.isatty():
            raise OptionError("standard output must be a terminal, for --watch; it is a file or a pipe")
        token, tls = access_of(arguments)

        def ask() -> tuple[float, Report]:
            report = ask_status(arguments.address, token=token, tls=tls)
            return time.monotonic(), report

        if arguments.json:
            say(json.dumps(ask()[1], indent=2))
            return 0
        needs_rich("loaderd status without --json")
        if arguments.watch:
            _watch(ask)
        else:
            from rich.console import Console

            before = ask()
            if before[1]["consumers"]:
                time.sleep(_INTERVAL_S)
            Console(width=None if sys.stdout.isatty() else 200).print(screen(before, ask()))
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _watch(ask: Callable[[], tuple[float, Report]]) -> None:
    from rich.live import Live

    before = ask()
    with Live(screen(before, before), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_INTERVAL_S)
            now = ask()
            live.update(screen(before, now), refresh=True)
            before = now


def screen(before: tuple[float, Report], now: tuple[float, Report]) -> RenderableType:
    """A server's report ``now``, with rates since ``before``; each is (time in seconds, report)."""
    from rich.console import Group
    from rich.text import Text

    report = now[1]
    since = span(time.time() - report["started_s"])
    head = (
        f"loaderd {report['version']}, process {report['pid']}, for {since}; "
        f"{report['workers']} workers ({report['workers_restarted']} replaced); "
        f"{in_mib(report['memory_bytes'])} of windows and batches"
    )
    parts: list[RenderableType] = [_text(head), _datasets(report)]
    parts.append(_consumers(before, now) if report["consumers"] else Text("no consumers"))
    parts += [_text(f"{_who(each)}: {each['state']}") for each in report["consumers"] if each.get("state")]
    return Group(*parts)


def _text(text: str) -> Text:
    """What a server says, and what its consumers call themselves, in a cell."""
    from rich.text import Text

    return Text(readable_line(text))


def _datasets(report: Report) -> Table:
    from rich.table import Table

    table = Table("data set", "state", box=None, pad_edge=False)
    for title in ("shards", "records"):
        table.add_column(title, justify="right")
    table.add_column("fields")
    for dataset in report["datasets"]:
        fields = ", ".join(f"{name} {spec}" for name, spec in dataset["fields"].items())
        sizes = [f"{dataset['num_shards'] or 0:,}", f"{dataset['num_records'] or 0:,}"]
        table.add_row(*map(_text, (dataset["name"], dataset["state"], *sizes, fields)))
    return table


def _consumers(before: tuple[float, Report], now: tuple[float, Report]) -> Table:
    from rich.table import Table

    table = Table("consumer", "data set", "sharing", "epoch, batch", box=None, pad_edge=False)
    for title in ("records", "records/s", "MB/s", "lent", "idle"):
        table.add_column(title, justify="right")
    passed_s = now[0] - before[0]
    # A daemon that replaced another one counts from 0.
    known = {each["number"]: each for each in before[1]["consumers"]} if before[1]["pid"] == now[1]["pid"] else {}
    for each in now[1]["consumers"]:
        if "sharing" not in each:
            table.add_row(*map(_text, (_who(each), each["dataset"], "connecting")))
            continue
        last = known.get(each["number"], {})
        rates = ["", ""]
        if passed_s > 0 and "records" in last:
            records, num_bytes = ((each[what] - last[what]) / passed_s for what in ("records", "bytes"))
            rates = [f"{records:,.0f}", f"{num_bytes / 1e6:,.1f}"]
        cells = [
            _who(each),
            each["dataset"],
            _sharing(each),
            f"{each['epoch']}, {each['batch']}",
            f"{each['records']:,}",
            *rates,
            f"{each['slots_lent']} of {each['slots']}",
            span(each["idle_s"]),
        ]
        table.add_row(*map(_text, cells))
    return table


def _who(consumer: Report) -> str:
    return " ".join(filter(None, (str(consumer["number"]), consumer["name"], f"({consumer['pid']})")))


def _sharing(consumer: Report) -> str:
    if consumer["sharing"] == "split":
        rank, ranks = consumer["shard"]
        return f"split {rank} of {ranks}"
    return " ".join(filter(None, (consumer["sharing"], consumer["group"])))
