"""``loaderd doctor``: what a consumer waits for, and what would help; with --schema, how fast shards load."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from loaderd.cli.doctor_shards import add_shard_options, examine
from loaderd.cli.parallel_scan import say
from loaderd.cli.server_access import access_of, add_access, no_report
from loaderd.client.connect import ask_status
from loaderd.errors import LoaderdError, OptionError
from loaderd.observe.diagnose import COPY_TO_DEVICE, Diagnosis, diagnose_samples
from loaderd.observe.running_streams import RunningStream, running_streams
from loaderd.options import require
from loaderd.progress import ProgressDisplay
from loaderd.redaction import readable, readable_line
from loaderd.remote.security import TLS
from loaderd.snapshots import Progress

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PATIENCE_S = 6.0
_AGAIN_S = 0.5
_ADDRESSES = ("unix:", "http:", "https:", "grpc:", "grpc+tls:")  # of the last two it is said what to write now
_DESCRIPTION = """\
Tell whether a training waits for data, why, and what would help, judged by its last five seconds. TARGET is the
number of the training's process, or the address of a server, such as unix: or https://HOST:PORT; without TARGET,
all trainings of this user are judged. With --schema, TARGET are shards: they are loaded for some seconds, to tell
how fast this machine can be, what each stage takes, and how many workers a training needs. The exit status is 0; 1
if a training waits for more than --max-waiting of its time, or needs more workers; 2 if there is nothing to judge.
"""
_EXAMPLE = "example: loaderd doctor 'shards/*.tfrecord' --schema chess_eval --seconds 5"


@dataclass(frozen=True)
class Case:
    """A consumer and its diagnosis."""

    who: str
    pid: int
    diagnosis: Diagnosis


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("doctor", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="process numbers, an address, or shards")
    parser.add_argument("--json", action="store_true", help="all of it, as a JSON list")
    parser.add_argument(
        "--max-waiting",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="a share of the time, from 0 to 1; above it, the exit status is 1; default: %(default)s",
    )
    add_access(parser)
    add_shard_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 if a training waits too much or needs more workers; 2 if there is nothing to judge."""
    most = arguments.max_waiting
    try:
        require(0 <= most <= 1, "--max-waiting", "a share of the time, from 0 to 1", most)
        if arguments.schema is not None:
            return examine(arguments)
        cases = _cases(arguments)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.json:
        say(json.dumps([asdict(case) for case in cases], indent=2))
    else:
        say("\n\n".join(map(text_of, cases)))
    if all(case.diagnosis.verdict == "nothing yet" for case in cases):
        return 2
    return int(any(case.diagnosis.waiting_share > most for case in cases))


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases of all targets. Raises LoaderdError if there is none."""
    targets: Sequence[str] = arguments.targets
    if targets and all(target.startswith(_ADDRESSES) for target in targets):
        access = access_of(arguments)
        return [case for target in targets for case in _of_server(target, *access)]
    if not all(target.isascii() and target.isdigit() for target in targets):
        raise OptionError(
            f"TARGETs must be numbers of processes, or addresses of servers, got {' and '.join(map(repr, targets))}",
            hint="`loaderd top` shows the numbers of processes. Shards need --schema, such as --schema lc0; "
            "`loaderd inspect SHARD` may name it.",
        )
    pids = frozenset(map(int, targets))
    streams = running_streams(pids)
    if not streams:
        whose = f"process {', '.join(targets)}" if targets else "any process of yours"
        raise OptionError(
            f"no training that loads with loaderd was found in {whose}",
            hint="It must be your own, on this machine, with this version of loaderd; in a container, ask there. "
            "Consumers in groups have no diagnosis.",
        )
    until_s = time.monotonic() + _PATIENCE_S
    with closing(ProgressDisplay(None)) as display:
        while time.monotonic() < until_s and any(_diagnosis(one).verdict == "nothing yet" for one in streams):
            display(Progress("waiting for batches to judge by"))
            time.sleep(_AGAIN_S)
    return [Case(stream.command, stream.consumer, _diagnosis(stream)) for stream in streams]


def _diagnosis(stream: RunningStream) -> Diagnosis:
    return diagnose_samples(stream.watched.samples(), stream.watched.facts)


def _of_server(address: str, token: str | None, tls: TLS | None) -> list[Case]:
    report = ask_status(address, token=token, tls=tls)
    try:
        found = [one for one in report["consumers"] if one.get("diagnosis")]
        cases = [Case(one["name"], one["pid"], Diagnosis._from_wire(one["diagnosis"])) for one in found]
        for case in cases:
            text_of(case)
    except Exception as error:  # anybody may listen there
        raise no_report(address, error) from None
    if not cases:
        raise OptionError(
            f"the server at {address} has no consumer that can be diagnosed",
            hint="Only consumers on the server's machine with a stream of their own can be.",
        )
    return cases


def text_of(case: Case) -> str:
    """A case in words: the process, the diagnosis with its advice, the evidence."""
    found = case.diagnosis
    lines = [f"process {case.pid}: {readable_line(case.who)}", readable(str(found))]
    if found.verdict != "nothing yet":
        low, high = found.waiting_spread
        lines.append(
            f"Evidence: {found.steps_per_s:,.1f} steps/s, {found.records_per_s:,.0f} records/s over "
            f"{found.over_s:.1f} s; waiting is {found.waiting_share:.0%} of the time, and of single steps "
            f"{low:.0%} to {high:.0%}."
        )
        spent = sorted(found.stage_ns.items(), key=lambda item: -item[1])
        spent = [(name, ns) for name, ns in spent if name != COPY_TO_DEVICE]  # the consumer's time
        lines.append("Workers, ns a record: " + ", ".join(f"{name} {ns:,.0f}" for name, ns in spent if ns >= 1))
    return "\n".join(lines)
