"""Compare loaderd with its alternatives, on your shards or on synthetic ones::

python bench/compare.py ['shards/*.tfrecord' --schema my.module:schema]
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from competitors import CANDIDATES, all_specs
from harness.comparison import Comparison, Pace
from harness.display import Display
from harness.inputs import Inputs, from_user, synthetic
from harness.interface import CHESS, Config, configure, is_known
from harness.measured import Timing
from harness.run_candidate import add_options
from harness.synthetic import COMPRESSIONS, check_record_size
from rich.console import Console

from loaderd.errors import LoaderdError, OptionError
from loaderd.options import as_count, require
from loaderd.redaction import readable
from loaderd.schemas.named import full_name, not_loaded
from loaderd.user_modules import add_working_directory

_DESCRIPTION = """\
Compare loaderd with its alternatives, on your shards or on synthetic ones. Every candidate is checked first: one that
does not deliver the same values is named and not timed. Then they are timed in rounds, each run in a process of its
own. Writes a table, a line of JSON for each run, and a chart. The exit status is 0; 1 if a candidate failed or
delivered other values; 2 if nothing could be compared."""

_NUM_SHARDS = 16
_GIB = 4.0
# ``--quick`` shall take a minute on two cores, although most runs import TensorFlow first: so it runs the candidates
# that newcomers ask about, on fewer records, and does not time the first batch without an index.
_QUICK_CANDIDATES = ("tfdata_tuned", "tfdata_expert", "loaderd_tfdata", "loaderd_python")
_QUICK_RECORDS = 200_000
_QUICK_GIB = 0.25


_FULL, _QUICK = Pace(5, Timing.seconds, Timing.warmup_s, 2), Pace(2, 1.0, 0.5, 1)
_LEAST = Pace(1, 0.1, 0.0, 1)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(pace: Pace) -> str:
    return " ".join(f"{_flag(name)} {value:g}" for name, value in vars(pace).items())


_QUICK_HELP = (
    f"{_shown(_QUICK)} --candidates '{' '.join(_QUICK_CANDIDATES)}', --records {_QUICK_RECORDS} or --max-gib "
    f"{_QUICK_GIB:g}, and the first batch without an index is not timed"
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("shards", nargs="*", metavar="SHARDS", help="paths or globs; default: synthetic shards")
    read = parser.add_argument_group("your shards")
    read.add_argument("--max-gib", type=float, metavar="GIB", help=f"read no more of them; default: {_GIB:g}")
    made = parser.add_argument_group("synthetic shards")
    made.add_argument("--records", type=int, metavar="N", help="how many; default: 1,500,000, or half a GiB of them")
    made.add_argument(
        "--record-size", type=int, metavar="BYTES", help="packed bits of each, in bytes; default: chess records"
    )
    made.add_argument("--num-shards", type=int, metavar="N", help=f"default: {_NUM_SHARDS}")
    made.add_argument("--compression", choices=COMPRESSIONS[1:], help="default: none")
    made.add_argument(
        "--work-dir",
        type=Path,
        default=Path("~/.cache/loaderd-bench"),
        metavar="FOLDER",
        help="where they are kept; default: %(default)s",
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument("--candidates", metavar="'A B …'", help=f"default: {' '.join(all_specs())}")
    add_options(what)
    pace = parser.add_argument_group("for how long")
    pace.add_argument("--quick", action="store_true", help=f"a first impression in a minute: {_QUICK_HELP}")
    pace.add_argument("--rounds", type=int, metavar="N", help=f"of all candidates; default: {_FULL.rounds}")
    pace.add_argument(
        "--seconds", type=float, metavar="S", help=f"that a run is timed, at least; default: {_FULL.seconds:g}"
    )
    pace.add_argument(
        "--warmup-seconds",
        type=float,
        metavar="S",
        help=f"of a run before it is timed; default: {_FULL.warmup_seconds:g}",
    )
    pace.add_argument(
        "--attempts", type=int, metavar="N", help=f"at a run that other processes disturb; default: {_FULL.attempts}"
    )
    left = parser.add_argument_group("results")
    left.add_argument(
        "--results-dir", type=Path, default=Path("loaderd-bench"), metavar="FOLDER", help="default: %(default)s"
    )
    left.add_argument("--name", metavar="NAME", help="of the files, without their ending; default: date and time")
    return parser.parse_args()


def _inputs_of(options: argparse.Namespace, scratch: Path) -> Inputs:
    """The shards that are asked for. Raises ValueError, OptionError, and ShardError for one that cannot be read."""
    for name in ("records", "record_size", "num_shards", "batch_size", "workers"):
        if getattr(options, name) is not None:
            as_count(getattr(options, name), _flag(name))
    if options.max_gib is not None:
        require(0 < options.max_gib < math.inf, "--max-gib", "a finite number above 0", options.max_gib)
    schema = CHESS if options.schema is None else full_name(options.schema)
    of_synthetic = ("records", "record_size", "num_shards", "compression")
    given = [_flag(name) for name in of_synthetic if getattr(options, name) is not None]
    if options.shards and given:
        raise ValueError(f"{', '.join(given)}: of synthetic shards only, but SHARDS are given")
    if options.schema and not options.shards:
        raise ValueError("--schema says what is in SHARDS, but none are given")
    if options.record_size is not None:
        check_record_size(options.record_size)
        schema = "harness.reference:bits"
    base = Config(
        (),
        options.compression or "",
        options.batch_size,
        workers=options.workers,
        schema=schema,
        record_size=options.record_size,
    )
    add_working_directory(schema)
    try:
        base.delivered()
    except Exception as error:
        raise not_loaded(schema, error) from None
    if options.shards:
        max_gib = options.max_gib or (_QUICK_GIB if options.quick else _GIB)
        return from_user(base, options.shards, scratch, int(max_gib * (1 << 30)))
    records = options.records or (_QUICK_RECORDS if options.quick else None)
    try:
        work_dir = options.work_dir.expanduser()
    except RuntimeError as error:  # there is no such user, or this one has no home
        raise OptionError(f"--work-dir {options.work_dir} is no folder: {error}") from None
    return synthetic(base, work_dir, scratch, records, options.num_shards or _NUM_SHARDS)


def _exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP raise SystemExit, so that what is temporary is removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def main() -> int:
    """The exit status: 1 if a candidate failed or delivered something else, 2 where nothing could be compared."""
    options = _options()
    _exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="loaderd-bench-") as scratch:
        try:
            default = _QUICK_CANDIDATES if options.quick else all_specs()
            specs = list(default) if options.candidates is None else options.candidates.split()
            require(bool(specs), "--candidates", "names of candidates", options.candidates)
            for spec in specs:
                if not is_known(name := configure(spec, Config(()))[0]):
                    raise ValueError(f"--candidates {name} must be one of {', '.join(CANDIDATES)}")
            pace = _pace_of(options)
            inputs = _inputs_of(options, Path(scratch))
            # A log or a file has room for all columns of the table.
            with Display(Console(width=None if sys.stdout.isatty() else 200)) as display:
                name = options.name or f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
                log = options.results_dir / f"{name}.jsonl"
                comparison = Comparison(inputs, pace, log, Path(scratch), options.timeout, display)
                command = shlex.join(["python", *sys.argv])
                return 0 if comparison.run(specs, command, has_cold_starts=not options.quick) else 1
        except (ValueError, LoaderdError) as error:
            sys.stderr.write(f"{readable(str(error))}\n")
            return 2


def _pace_of(options: argparse.Namespace) -> Pace:
    """The pace that the options ask for. Raises OptionError."""
    given = {name: getattr(options, name) for name in vars(_FULL)}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        least = getattr(_LEAST, name)
        require(least <= value < math.inf, _flag(name), f"a number of at least {least:g}", value)
    return replace(_QUICK if options.quick else _FULL, **chosen)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
