"""``loaderd status``: what a server serves, to whom, how fast, and who waits for whom."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from loaderd.cli.live_screen import needs_rich, watch
from loaderd.cli.parallel_scan import say
from loaderd.cli.server_access import access_of, add_access, no_report
from loaderd.client.connect import ask_status
from loaderd.errors import LoaderdError, OptionError
from loaderd.machine import in_mib
from loaderd.redaction import readable_line
from loaderd.remote.security import TLS
from loaderd.snapshots import span

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Report = Mapping[str, Any]

_INTERVAL_S = 1.5
_MOST_AT_A_TIME = 16
_MOST_SHOWN = 40


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "status",
        epilog="example: loaderd status unix: https://10.0.0.1:8471",
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
        ask = partial(_ask, arguments, *access_of(arguments))
        if arguments.json:
            return _print_json(ask(), len(arguments.addresses) > 1)
        needs_rich("loaderd status without --json")
        if arguments.watch:
            last: deque[Answers] = deque(maxlen=3)  # of two seconds, as servers on the network count once a second

            def show() -> RenderableType:
                last.append(ask())
                return screen(last[0], last[-1])

            watch(show)
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
    """What servers said at ``at_s`` (monotonic), by their addresses; of those that do not answer, why."""

    at_s: float
    there: Mapping[str, Report]
    away: Mapping[str, LoaderdError] = field(default_factory=dict)


def _ask(arguments: argparse.Namespace, token: str | None, tls: TLS | None) -> Answers:
    """Raises LoaderdError where the only server does not answer."""

    def of(address: str) -> Report | LoaderdError:
        try:
            report = ask_status(address, token=token, tls=tls)
            if not arguments.json:
                _check(address, report)
            return report
        except LoaderdError as error:
            if len(arguments.addresses) == 1:
                raise
            return error

    with ThreadPoolExecutor(_MOST_AT_A_TIME) as pool:
        found = dict(zip(arguments.addresses, pool.map(of, arguments.addresses), strict=True))
    there = {address: each for address, each in found.items() if not isinstance(each, LoaderdError)}
    away = {address: each for address, each in found.items() if isinstance(each, LoaderdError)}
    return Answers(time.monotonic(), there, away)


def _check(address: str, report: Report) -> None:
    """Raise ServerError for a report that cannot be shown: anybody may listen there."""
    try:
        screen(Answers(0.0, {address: report}), Answers(1.0, {address: report}))
    except Exception as error:
        raise no_report(address, error) from None


def _print_json(answers: Answers, with_addresses: bool) -> int:
    for address, report in answers.there.items():
        say(json.dumps({"address": address, **report} if with_addresses else report))
    sys.stderr.writelines(f"{error.message}\n" for error in answers.away.values())
    return 1 if answers.away else 0


def screen(before: Answers, now: Answers) -> RenderableType:
    """What servers say ``now``, with rates since ``before``."""
    from rich.console import Group
    from rich.text import Text

    has_several = len(now.there) + len(now.away) > 1
    parts: list[RenderableType] = []
    for where, report in now.there.items():
        parts.append(_text(f"{_head(report)} ({where})" if has_several else _head(report)))
    parts.append(_datasets(now))
    consumers = [each for report in now.there.values() for each in report["consumers"]]
    parts.append(_consumers(before, now) if consumers else Text("no consumers"))
    parts += [_text(f"{_who(each)}: {each['state']}") for each in consumers if each.get("state")]
    parts += [_text(f"{where}: {error.message}") for where, error in now.away.items()]
    return Group(*parts)


def _head(report: Report) -> str:
    since = span(time.time() - report["started_s"])
    head = f"loaderd {report['version']}, process {report['pid']}, for {since}"
    if "workers" not in report:
        return head
    workers = f"{report['workers']} workers ({report['workers_restarted']} replaced)"
    return f"{head}; {workers}; {in_mib(report['memory_bytes'])} of windows and batches"


def _text(text: str) -> Text:
    """What a server says, and what its consumers call themselves, in a cell."""
    from rich.text import Text

    return Text(readable_line(text))


def _datasets(answers: Answers) -> Table:
    table = _table("data set", "state", numbers=["shards", "records"])
    table.add_column("fields")
    rows: Counter[tuple[str, ...]] = Counter()
    for report in answers.there.values():
        for dataset in report["datasets"]:
            fields = ", ".join(f"{name} {spec}" for name, spec in dataset["fields"].items())
            sizes = f"{dataset['num_shards'] or 0:,}", f"{dataset['num_records'] or 0:,}"
            row = (dataset["name"], dataset["state"], *sizes, fields)
            rows[row] += 1
    for (name, state, *others), servers in rows.items():  # servers that say the same share a row
        state = state if servers == 1 else f"{state} on {servers} servers"
        table.add_row(*map(_text, (name, state, *others)))
    return table


def _table(*texts: str, numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(*texts, box=None, pad_edge=False)
    for title in numbers:
        table.add_column(title, justify="right")
    return table


@dataclass
class _Row:
    """A consumer. One on the network may ask all servers; what it has had of them is added up."""

    consumer: Report
    records: float = 0.0
    rates: tuple[float, float] | None = None
    """Records and bytes a second."""
    idle_s: float = math.inf

    def add(self, of_server: Report, before: Report, passed_s: float) -> None:
        """``before``: what the server said ``passed_s`` before; empty: nothing."""
        self.records += of_server.get("records", 0)
        self.idle_s = min(self.idle_s, of_server.get("idle_s", time.time() - of_server.get("seen", 0)))
        if passed_s > 0 and "records" in before:
            had = self.rates or (0.0, 0.0)
            more = [(of_server[what] - before[what]) / passed_s for what in ("records", "bytes")]
            self.rates = had[0] + more[0], had[1] + more[1]

    def cells(self) -> list[str]:
        one = self.consumer
        rates = ["", ""] if self.rates is None else [f"{self.rates[0]:,.0f}", f"{self.rates[1] / 1e6:,.1f}"]
        place = [one.get("rank", "connecting"), ""]
        lent = ""
        if "sharing" in one:
            place = [_sharing(one), f"{one['epoch']}, {one['batch']}"]
            lent = f"{one['slots_lent']} of {one['slots']}"
        idle = span(max(0.0, self.idle_s))
        return [_who(one), one["dataset"], *place, f"{self.records:,.0f}", *rates, lent, idle]


def _consumers(before: Answers, now: Answers) -> Table:
    rows: dict[tuple[str, ...], _Row] = {}
    for where, report in now.there.items():
        last = before.there.get(where, report)
        passed_s = report.get("counted_s", now.at_s) - last.get("counted_s", before.at_s)
        # A daemon that replaced another one counts from 0.
        known = {_key(where, each): each for each in last["consumers"]} if last["pid"] == report["pid"] else {}
        for each in report["consumers"]:
            key = _key(where, each)
            rows.setdefault(key, _Row(each)).add(each, known.get(key, {}), passed_s)
    titles = "consumer", "data set", "sharing", "epoch, batch"
    table = _table(*titles, numbers=["records", "records/s", "MB/s", "lent", "idle"])
    too_many = len(rows) - _MOST_SHOWN
    by_age = sorted(rows.values(), key=lambda row: row.idle_s) if too_many > 0 else list(rows.values())
    for row in by_age[:_MOST_SHOWN]:
        table.add_row(*map(_text, row.cells()))
    if too_many > 0:
        table.add_row(_text(f"… and {too_many:,} more: see --json"))
    return table


def _key(where: str, consumer: Report) -> tuple[str, ...]:
    if "number" in consumer:
        return where, str(consumer["number"])
    return tuple(str(consumer[what]) for what in ("name", "host", "process", "rank", "dataset"))


def _who(consumer: Report) -> str:
    if "number" in consumer:
        return " ".join(filter(None, (str(consumer["number"]), consumer["name"], f"({consumer['pid']})")))
    process = f"({consumer['process']})" if consumer["process"] else ""
    host = f"on {consumer['host']}" if consumer["host"] else ""
    return " ".join(filter(None, (consumer["name"], process, host)))


def _sharing(consumer: Report) -> str:
    if consumer["sharing"] == "split":
        rank, ranks = consumer["shard"]
        return f"split {rank} of {ranks}"
    return " ".join(filter(None, (consumer["sharing"], consumer["group"])))
