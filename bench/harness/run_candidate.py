"""Run one candidate in a process of its own, for one configuration, and print one JSON line.

::

    this process ──job──► measured.py: the candidate's consumer ──► its daemon, its workers, …
         │                                     │
         └── reads everyone's memory ──────────┴── one JSON line comes back

Memory is sampled in this process, so that the measured process does nothing but consume.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from harness.interface import CHESS, Config, configure
from harness.measured import Timing
from harness.process_tree import process_tree, pss_bytes
from loaderd.options import default_workers
from loaderd.schemas.named import SCHEMA_HELP, full_name

_SAMPLE_INTERVAL_S = 0.5
# The working directory, which is first in sys.path here, may be shared; where it belongs there, PYTHONPATH names it.
_BOOT = "import sys;sys.path[:]=filter(None,sys.path)\nfrom harness.measured import main;main()"


class CandidateError(Exception):
    """A candidate's process failed or took too long; the message holds the end of what it wrote."""


class LeftOut(CandidateError):
    """A candidate cannot deliver what the configuration asks for, or needs what is not installed: no failure."""


def run_candidate(
    spec: str, base: Config, timing: Timing | None, *, timeout_s: float = 600.0, index_cache: Path | None = None
) -> dict[str, Any]:
    """Measure ``spec`` (digest one epoch of it, if ``timing`` is None) and return what its process printed.

    Adds the candidate, its configuration and ``peak_pss_bytes``. ``index_cache`` is where loaderd keeps its indexes;
    None: the usual place. Raises LeftOut, CandidateError, or ValueError for an unknown option.
    """
    name, config = configure(spec, base)
    job = {"candidate": name, "config": asdict(config), "timing": timing and asdict(timing)}
    output, peak_pss = _run(spec, json.dumps(job), timeout_s, index_cache)
    result = json.loads(output.splitlines()[-1])
    if "left_out" in result:
        raise LeftOut(result["left_out"])
    settings = {key: value for key, value in asdict(config).items() if key != "shards"}
    return {"candidate": spec, **result, "peak_pss_bytes": peak_pss, "config": settings}


def _run(spec: str, job: str, timeout_s: float, index_cache: Path | None) -> tuple[str, int]:
    """The standard output of a measured process, and the highest PSS of it and its descendants, in bytes."""
    # Files, not pipes: what a candidate leaves running would hold a pipe open, and reading it would wait for that.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as log,
    ):
        given.write(job)
        given.seek(0)
        theirs, ours = os.pipe()  # ours is closed when this process ends, however it ends
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs)],
            stdin=given,
            stdout=out,
            stderr=log,
            env=_environment(index_cache),
            start_new_session=True,  # so that whatever it leaves behind can be ended with it
            pass_fds=(theirs,),
        )
        os.close(theirs)
        deadline, peak_pss = time.monotonic() + timeout_s, 0
        try:
            while True:
                try:
                    process.wait(timeout=_SAMPLE_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    peak_pss = max(peak_pss, pss_bytes(process_tree(process.pid)))
                    if time.monotonic() > deadline:
                        raise CandidateError(f"{spec}: not done after {timeout_s:.0f} s{_tail(log)}") from None
        finally:
            _end(process)
            os.close(ours)
        if process.returncode != 0:
            raise CandidateError(f"{spec}: ended with status {process.returncode}{_tail(log)}")
        out.seek(0)
        return out.read(), peak_pss


def _environment(index_cache: Path | None) -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    cache = {} if index_cache is None else {"LOADERD_CACHE_DIR": str(index_cache)}
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path, **cache}


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n" + log.read()[-2000:].rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group of the session, even if its leader has ended
    process.wait()


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of a single measurement that ``compare.py`` has, too."""
    parser.add_argument("--batch-size", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers(),
        metavar="N",
        help=f"worker processes of candidates that have them; default here: {default_workers()}",
    )
    parser.add_argument(
        "--schema",
        metavar="MODULE:NAME",
        help=f"what is in the shards: {SCHEMA_HELP}; default: {CHESS}",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="after so many seconds, a run has failed; default: 600",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure one candidate; print one JSON line.")
    parser.add_argument("candidate", help="a module, then options: tfdata_expert:noshuffle")
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--compression", choices=("", "GZIP", "ZLIB"), default="", help="of the shards")
    parser.add_argument("--seconds", type=float, default=Timing.seconds)
    parser.add_argument("--warmup-seconds", type=float, default=Timing.warmup_s)
    add_options(parser)
    options = parser.parse_args(arguments)
    timing = Timing(seconds=options.seconds, warmup_s=options.warmup_seconds)
    try:
        config = Config(
            tuple(options.shards),
            options.compression,
            options.batch_size,
            workers=options.workers,
            schema=CHESS if options.schema is None else full_name(options.schema),
        )
        result = run_candidate(options.candidate, config, timing, timeout_s=options.timeout)
    except (CandidateError, ValueError) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
