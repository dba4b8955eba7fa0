"""The steps of a comparison: the check, the cold starts, and the rounds in which the candidates take turns.

::

    check         one epoch of a few records each: do all deliver the values that are stored?
    cold starts   the first batch of each, once, while loaderd has no index of the shards
    rounds        each candidate once a round, each round beginning with another one

Every run is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

from harness.digest import Digest
from harness.hardware import describe_machine
from harness.interface import Config, configure
from harness.reference import decode, parse, read
from harness.report import best_tfdata
from harness.run_candidate import CandidateError, LeftOut
from loaderd.storage.files import list_shards

BUSY_CORES = 0.1  # beyond this, something else was running

Item = TypeVar("Item")
Failures = dict[str, str]  # spec -> what is wrong with it
Measure = Callable[[str], dict[str, Any]]


def expected_digest(config: Config) -> Digest:
    """The digest of the records of ``config``, read plainly and decoded as ``reference.py`` says.

    Raises ValueError where a record is damaged or is not what the schema says, loaderd's ShardError where a shard
    cannot be read.
    """
    schema = config.delivered()
    records = (record for file in list_shards(list(config.shards)) for record in read(file))
    return Digest().updated(schema, decode(schema, parse(schema, records)))


def check(specs: Sequence[str], checked: Config, digest: Measure) -> tuple[Failures, Failures]:
    """What is wrong with those that do not deliver the records of ``checked``, and why others are left out.

    ``digest`` runs a candidate over them. What a ``tf.function`` takes cannot be seen: a candidate with the option
    "graph" is checked without it. Raises what :func:`expected_digest` raises.
    """
    expected: dict[tuple[str, bool], Digest] = {}
    wrong: dict[str, CandidateError | None] = {}
    for spec in specs:
        eager = _eager(spec)
        if eager in wrong:
            continue
        config = configure(eager, checked)[1]
        kind = config.dtype, config.packed
        if kind not in expected:
            expected[kind] = expected_digest(config)
        wanted = asdict(expected[kind])
        try:
            delivered = digest(eager)["digest"]  # None where it carries no records
            if delivered not in (wanted, None):
                raise CandidateError(f"{eager}: delivered {delivered}, but {wanted} is stored")
            wrong[eager] = None
        except CandidateError as error:
            wrong[eager] = error
    reasons = {spec: reason for spec in specs if (reason := wrong[_eager(spec)]) is not None}
    left_out = {spec: str(reason) for spec, reason in reasons.items() if isinstance(reason, LeftOut)}
    return {spec: str(reason) for spec, reason in reasons.items() if spec not in left_out}, left_out


def _eager(spec: str) -> str:
    name, _, options = spec.partition(":")
    rest = ",".join(option for option in options.split(",") if option not in ("", "graph"))
    return f"{name}:{rest}" if rest else name


def cold_starts(
    specs: Sequence[str], first_batch: Measure, report: Callable[[dict[str, Any]], None]
) -> tuple[list[dict[str, Any]], Failures]:
    """A run of each up to its first batch, marked as ``cold``; and what failed."""
    runs, failures = [], {}
    for spec in specs:
        try:
            runs.append({"cold": True, **first_batch(spec)})
        except CandidateError as error:
            failures[spec] = str(error)
        else:
            report(runs[-1])
    return runs, failures


def turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """(round, item): every item once a round, each round beginning with another one."""
    return ((number, items[(number + turn) % len(items)]) for number in range(rounds) for turn in range(len(items)))


def take_turns(
    specs: Sequence[str],
    rounds: int,
    attempts: int,
    measure: Measure,
    report: Callable[[dict[str, Any]], None],
) -> tuple[list[dict[str, Any]], Failures]:
    """``measure`` every candidate once a round. Returns the runs that count, and what failed.

    A run during which other processes were busy is made again, up to ``attempts`` times in all: the first undisturbed
    one counts, else the last. The choice depends on the machine only, never on the speed. ``report`` gets all runs.
    """
    runs: list[dict[str, Any]] = []
    failures: Failures = {}
    for number, spec in turns(specs, rounds):
        if spec in failures:
            continue
        for attempt in range(attempts):
            try:
                run = {"round": number, "attempt": attempt, **measure(spec)}
            except CandidateError as error:
                failures[spec] = str(error)
                break
            report(run)
            if run["other_cores"] <= BUSY_CORES:
                break
        if spec not in failures:
            runs.append(run)
    return runs, failures


def circumstances_of(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The date, the machine, and the versions that the runs name."""
    versions = {name: version for run in runs for name, version in run.get("versions", {}).items()}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def facts_of(runs: list[dict[str, Any]], failed: Mapping[str, str], left_out: Mapping[str, str]) -> dict[str, str]:
    """What the reader of a table must know: when, where, with what, and what went wrong."""
    kinds = dict.fromkeys(run["delivered"] for run in runs)
    best = {kind: best_tfdata([run for run in runs if run["delivered"] == kind]) for kind in kinds}
    busy = sum(run["other_cores"] > BUSY_CORES for run in runs)
    facts = {
        **circumstances_of(runs),
        "best tf.data": ", ".join(f"{spec} ({kind})" for kind, spec in best.items() if spec),
        "disturbed": f"{busy} of the {len(runs)} runs that count, while over {BUSY_CORES} cores were busy elsewhere",
        "left out": grouped(left_out),
        "failed": grouped({spec: reason.splitlines()[-1] for spec, reason in failed.items()}),
    }
    if not busy:
        del facts["disturbed"]
    return {name: value for name, value in facts.items() if value}


def grouped(reasons: Mapping[str, str]) -> str:
    """Candidates with the reasons why, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for spec, reason in reasons.items():
        by_reason.setdefault(reason, []).append(spec)
    return "; ".join(f"{', '.join(specs)} ({reason})" for reason, specs in by_reason.items())
