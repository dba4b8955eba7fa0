"""Every way of using a data set and every way of ending, many times, beside a busy machine.

::

    python -m tests.reliability.endings [--times 50] [--busy 2] [--only REGEX] [--source loader]

The programs are those of ``tests/endings``. In a round there is a program of each use, of each end, of loaders and
of data sets, in pairs that differ from round to round; and those that end in a way of their own. Prints how long each
end took, as quantiles, and what was wrong; the exit status is 1 if anything was, or nothing ran. ``--source plain``
runs them without loaderd, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":  # not where a test imports it beside those of tests/endings
    os.environ.setdefault("ROUNDS", "20")  # beside a busy machine, 50 take longer than a program may
from tests.endings.ending import BUSY_LIMIT_S, Case, Result, Runner, every_use_and_end
from tests.endings.specials import SPECIALS


def one_round(pattern: str, source: str, rng: random.Random) -> list[Case]:
    """Of those in whose names the pattern is found: as few as have every use and every end, and what is special."""
    pairs = [case for case in every_use_and_end() if re.search(pattern, case.name)]
    rng.shuffle(pairs)
    seen: set[tuple[bool, object]] = set()
    found = []
    for case in pairs:
        parts = {(case.tensorflow, case.use), (case.tensorflow, case.end)}
        if parts - seen:
            seen |= parts
            found.append(case)
    if source != "plain":
        found += [case for case in SPECIALS if re.search(pattern, case.name)]
    rng.shuffle(found)
    return found


def run_all(
    cases: list[Case], folder: Path, source: str, limit_s: float, runners: int, verbose: bool
) -> list[Result]:
    """Each case once, ``runners`` at a time; raises what one raises, when those that run have ended."""
    runner = Runner(folder, source)

    def run(case: Case) -> Result:
        result = runner.run(case, limit_s)
        if verbose or result.problems:
            took = "" if result.took_s is None else f"{result.took_s:.2f} s"
            print(f"{case.name}: {took}", *result.problems, sep="\n    ", flush=True)
        return result

    with ThreadPoolExecutor(runners) as pool:
        return list(pool.map(run, cases))  # an error, or Ctrl-C, cancels those that have not begun


def summary(results: list[Result]) -> dict[str, object]:
    """Counts, and seconds from the last line to the end."""
    took = sorted(result.took_s for result in results if result.took_s is not None) or [0.0]
    quantiles = {share: took[min(len(took) - 1, int(len(took) * share))] for share in (0.5, 0.9, 0.99, 1)}
    wrong: Counter[str] = Counter(result.case.name for result in results if result.problems)
    return {
        "programs": len(results),
        "took_s": {share: round(took_s, 3) for share, took_s in quantiles.items()},
        "wrong": dict(wrong.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--busy", type=int, default=2, help="processes that spin beside it")
    parser.add_argument("--runners", type=int, default=2, help="programs that run at a time")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--source", default="loader", help="loader, plain, or the address of a server")
    parser.add_argument("--limit-s", type=float, default=BUSY_LIMIT_S)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is in the background of a shell ignores it,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this, under nohup: the programs would, too
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    results: list[Result] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(args.times):
                cases = one_round(args.only, args.source, rng)
                results += run_all(
                    cases, Path(folder) / str(number), args.source, args.limit_s, args.runners, args.verbose
                )
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    print(json.dumps(summary(results)))
    return 1 if not results or any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
