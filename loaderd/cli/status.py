"""``loaderd status``: what a server serves, to whom, how fast, and who waits for whom."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderd.cli.parallel_scan import needs_rich, say
from loaderd.cli.server_access import access_of, add_access
from loaderd.client.connect import ask_status
from loaderd.errors import LoaderdError, OptionError
from loaderd.machine import in_mib
from loaderd.redaction import readable_line
from loaderd.snapshots import span

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Report = Mapping[str, Any]

_INTERVAL_S = 1.0
_MOST_AT_A_TIME = 16
_MOST_SHOWN = 40


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "status",
        help="a server's data sets and consumers, and who waits",
        description="Show servers on one screen: their data sets, their consumers, their rates, and who waits for "
        "whom. The exit status is 0, or 1 if a server does not answer.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "addresses",
        nargs="*",
        default=["unix:"],
        metavar="ADDRESS",
        help="unix:///PATH or https://HOST:PORT; default: unix:, where this user's servers listen by default",
    )
    parser.add_argument("--json", action="store_true", help="all of it, a JSON object a line for each server")
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    add_access(parser)


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; or 1 if a server does not answer."""
    try:
        if arguments.watch and not sys.stdout.isatty():
            raise OptionError("standard output must be a terminal, for --watch; it is a file or a pipe")
        token, tls = access_of(arguments)

        def ask() -> Answers:
            def of(address: str) -> Report | LoaderdError:
                try:
                    return ask_status(address, token=token, tls=tls)
                except LoaderdError as error:
                    if len(arguments.addresses) == 1:
                        raise
                    return error

            with ThreadPoolExecutor(_MOST_AT_A_TIME) as pool:
                reports = dict(zip(arguments.addresses, pool.map(of, arguments.addresses), strict=True))
            return Answers(time.monotonic(), reports)

        if arguments.json:
            answers = ask()
            for address, report in answers.there.items():
                say(json.dumps(report if len(arguments.addresses) == 1 else {"address": address, **report}))
            sys.stderr.writelines(f"{error.message}\n" for error in answers.away.values())
            return 1 if answers.away else 0
        needs_rich("loaderd status without --json")
        if arguments.watch:
            _watch(ask)
        before = now = ask()
        if any(report["consumers"] for report in before.there.values()):
            time.sleep(_INTERVAL_S)
            now = ask()
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 200).print(screen(before, now))
        return 1 if now.away else 0
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 1


@dataclass(frozen=True)
class Answers:
    """What servers said at ``at_s`` (monotonic), by their addresses; of one that does not answer, why."""

    at_s: float
    reports: Mapping[str, Report | LoaderdError]

    @property
    def there(self) -> dict[str, Report]:
        return {where: each for where, each in self.reports.items() if not isinstance(each, LoaderdError)}

    @property
    def away(self) -> dict[str, LoaderdError]:
        return {where: each for where, each in self.reports.items() if isinstance(each, LoaderdError)}


def _watch(ask: Callable[[], Answers]) -> None:
    from rich.live import Live

    before = ask()
    with Live(screen(before, before), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_INTERVAL_S)
            now = ask()
            live.update(screen(before, now), refresh=True)
            before = now


def screen(before: Answers, now: Answers) -> RenderableType:
    """What servers say ``now``, with rates since ``before``."""
    from rich.console import Group
    from rich.text import Text

    heads = [
        _text(f"{_head(report)}{f' ({where})' if len(now.reports) > 1 else ''}")
        for where, report in now.there.items()
    ]
    parts: list[RenderableType] = [*heads, _datasets(now)]
    of_unix = {where: report for where, report in now.there.items() if "workers" in report}
    for where, report in of_unix.items():
        last = before.there.get(where, report)
        parts.append(
            _consumers((before.at_s, last), (now.at_s, report)) if report["consumers"] else Text("no consumers")
        )
        parts += [_text(f"{_who(each)}: {each['state']}") for each in report["consumers"] if each.get("state")]
    if len(of_unix) < len(now.there):
        parts.append(_readers(before, now))
    parts += [_text(f"{where}: {error.message}") for where, error in now.away.items()]
    return Group(*parts)


def _head(report: Report) -> str:
    since = span(time.time() - report["started_s"])
    head = f"loaderd {report['version']}, process {report['pid']}, for {since}"
    if "workers" not in report:
        return head
    workers = f"{report['workers']} workers ({report['workers_restarted']} replaced)"
    return f"{head}; {workers}; {in_mib(report['memory_bytes'])} of windows and batches"


def _readers(before: Answers, now: Answers) -> RenderableType:
    """Consumers that ask over HTTP. Each may ask all of the servers; what they have had of all is added up."""
    from rich.table import Table
    from rich.text import Text

    last, there = _had(before), _had(now)
    if not there:
        return Text("no consumers")
    table = Table("consumer", "host", "rank", "data set", box=None, pad_edge=False)
    for title in ("records", "records/s", "MB/s", "asked"):
        table.add_column(title, justify="right")
    passed_s = now.at_s - before.at_s
    latest = sorted(there.items(), key=lambda item: -item[1]["seen"])
    for (name, host, process, rank, dataset), had in latest[:_MOST_SHOWN]:
        rates = ["", ""]
        if passed_s > 0 and (previous := last.get((name, host, process, rank, dataset))):
            records, num_bytes = ((had[what] - previous[what]) / passed_s for what in ("records", "bytes"))
            rates = [f"{records:,.0f}", f"{num_bytes / 1e6:,.1f}"]
        asked = f"{span(max(0.0, time.time() - had['seen']))} ago"
        cells = [
            f"{name} ({process})" if process else name,
            host,
            rank,
            dataset,
            f"{had['records']:,.0f}",
            *rates,
            asked,
        ]
        table.add_row(*map(_text, cells))
    if len(latest) > _MOST_SHOWN:
        table.add_row(_text(f"… and {len(latest) - _MOST_SHOWN:,} more: see --json"))
    return table


def _had(answers: Answers) -> dict[tuple[str, ...], dict[str, float]]:
    """What each consumer has had of all servers that answer."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for report in answers.there.values():
        for each in () if "workers" in report else report["consumers"]:
            key = tuple(str(each[what]) for what in ("name", "host", "process", "rank", "dataset"))
            had = found.setdefault(key, {"records": 0.0, "bytes": 0.0, "seen": 0.0})
            had["records"] += each["records"]
            had["bytes"] += each["bytes"]
            had["seen"] = max(had["seen"], each["seen"])
    return found


def _text(text: str) -> Text:
    """What a server says, and what its consumers call themselves, in a cell."""
    from rich.text import Text

    return Text(readable_line(text))


def _datasets(answers: Answers) -> Table:
    from rich.table import Table

    table = Table("data set", "state", box=None, pad_edge=False)
    for title in ("shards", "records"):
        table.add_column(title, justify="right")
    table.add_column("fields")
    rows: dict[tuple[str, ...], int] = {}
    for report in answers.there.values():
        for dataset in report["datasets"]:
            fields = ", ".join(f"{name} {spec}" for name, spec in dataset["fields"].items())
            sizes = f"{dataset['num_shards'] or 0:,}", f"{dataset['num_records'] or 0:,}"
            row = (dataset["name"], dataset["state"], *sizes, fields)
            rows[row] = rows.get(row, 0) + 1
    for (name, state, *others), servers in rows.items():  # servers that say the same share a row
        state = state if servers == 1 else f"{state} on {servers} servers"
        table.add_row(*map(_text, (name, state, *others)))
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
