"""Run one candidate in a process of its own, for one configuration, and print one JSON line.

::

    this process ──job──► measured.py: the candidate's consumer ──► its daemon, its workers, …
         │                                     │
         └── reads everyone's memory ──────────┴── one JSON line comes back

Memory is sampled from out here, so that the measured process does nothing but consume.
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
from typing import IO, Any

from loaderd.bench.interface import Config, configure
from loaderd.bench.measured import Window
from loaderd.bench.process_tree import process_tree, pss_bytes

_SAMPLE_INTERVAL_S = 0.5


class CandidateError(Exception):
    """A candidate's process failed or took too long; the message holds the end of what it wrote."""


def run_candidate(spec: str, base: Config, window: Window | None, *, timeout_s: float = 600.0) -> dict[str, Any]:
    """Measure ``spec`` (digest one epoch of it, if ``window`` is None) and return what its process printed.

    Adds the candidate, its configuration and ``peak_pss_bytes``. Raises CandidateError, or ValueError for a
    spec that is none.
    """
    name, config = configure(spec, base)
    job = {"candidate": name, "config": asdict(config), "window": window and asdict(window)}
    output, peak_pss = _run(spec, json.dumps(job), timeout_s)
    settings = {key: value for key, value in asdict(config).items() if key != "shards"}
    return {"candidate": spec, **json.loads(output.splitlines()[-1]), "peak_pss_bytes": peak_pss, "config": settings}


def _run(spec: str, job: str, timeout_s: float) -> tuple[str, int]:
    """The standard output of a measured process, and the highest PSS of it and its descendants, in bytes."""
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as log:
        given.write(job)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "loaderd.bench.measured"],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(),
            start_new_session=True,  # so that whatever it leaves behind can be ended with it
        )
        deadline, peak_pss = time.monotonic() + timeout_s, 0
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_SAMPLE_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    peak_pss = max(peak_pss, pss_bytes(process_tree(process.pid)))
                    if time.monotonic() > deadline:
                        raise CandidateError(f"{spec}: not done after {timeout_s:.0f} s{_tail(log)}") from None
        finally:
            _end(process)
        if process.returncode != 0:
            raise CandidateError(f"{spec}: ended with status {process.returncode}{_tail(log)}")
        return output, peak_pss


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path}


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n" + log.read()[-2000:].rstrip()


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the session's group, its leader ended or not
    process.wait()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``compare.py`` has too."""
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2, help="worker processes of loaderd, writers of the floor")
    parser.add_argument("--compression", choices=("", "GZIP", "ZLIB"), default="", help="of the shards")
    parser.add_argument("--seconds", type=float, default=3.0, help="measure at least so long")
    parser.add_argument("--examples", type=int, help="measure at least so many (default: 300,000)")
    parser.add_argument("--warmup-seconds", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a candidate has failed")


def config_of(options: argparse.Namespace, shards: list[str]) -> Config:
    return Config(tuple(shards), options.compression, options.batch_size, workers=options.workers)


def window_of(options: argparse.Namespace, examples: int) -> Window:
    return Window(options.examples or examples, options.seconds, warmup_s=options.warmup_seconds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure one candidate; print one JSON line.")
    parser.add_argument("candidate", help="a module of bench/candidates, then options: tfdata_expert:noshuffle")
    parser.add_argument("shards", nargs="+")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        result = run_candidate(
            options.candidate,
            config_of(options, options.shards),
            window_of(options, 300_000),
            timeout_s=options.timeout,
        )
    except (CandidateError, ValueError) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
