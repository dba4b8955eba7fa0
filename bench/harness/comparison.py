"""A comparison from the check to the chart: runs the candidates, shows what they did, and writes it down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import chart
from harness.display import Display
from harness.inputs import Inputs
from harness.interface import Config
from harness.measured import FIRST_BATCH, Timing
from harness.report import COLUMNS, Summary, markdown, summarise
from harness.rounds import Failures, check, cold_starts, facts_of, grouped, take_turns
from harness.run_candidate import run_candidate
from loaderd.errors import OptionError

Run = dict[str, Any]


@dataclass(frozen=True)
class Pace:
    """How long a comparison measures; ``attempts``: at most so many for a run that other processes disturb."""

    rounds: int
    seconds: float
    warmup_seconds: float
    attempts: int


class Comparison:
    """``log``: a file that gets a line of JSON for each run. The table and the chart are written beside it.

    Raises OptionError where it cannot be written.
    """

    def __init__(
        self, inputs: Inputs, pace: Pace, log: Path, scratch: Path, timeout_s: float, display: Display
    ) -> None:
        self._inputs, self._pace, self._log = inputs, pace, log
        self._scratch, self._timeout_s, self._display = scratch, timeout_s, display
        self._failed: Failures = {}
        self._left_out: Failures = {}
        self._cold: list[Run] = []
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
        except OSError as error:
            text = f"the results cannot be written to {log}: {error.strerror}"
            raise OptionError(text, hint="Give another folder or name: --results-dir, --name.") from None

    def run(self, specs: Sequence[str], command: str, has_cold_starts: bool) -> bool:
        """Returns whether every candidate could be timed. ``command``: what the user called, for the table."""
        self._display.say(f"{self._inputs.about}; batches of {self._inputs.timed.batch_size}")
        self._check(specs)
        warm_page_cache(self._inputs.timed.shards)
        if has_cold_starts:
            self._measure_cold_starts(self._remaining(specs))
        runs = self._measure_rounds(self._remaining(specs))
        if runs:
            self._publish(runs, command)
        return bool(runs) and not self._failed

    def _remaining(self, specs: Sequence[str]) -> list[str]:
        return [spec for spec in specs if spec not in self._failed and spec not in self._left_out]

    def _measured(self, spec: str, config: Config, timing: Timing | None, what: str) -> Run:
        self._display.begin(f"{what}: {spec}")
        index_cache = self._scratch / ("check" if timing is None else f"index of {spec}")
        return run_candidate(spec, config, timing, timeout_s=self._timeout_s, index_cache=index_cache)

    def _keep(self, run: Run) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(run) + "\n")

    def _fail(self, failures: Failures) -> None:
        self._failed |= failures
        for reason in failures.values():
            self._display.say(reason, style="red")

    def _check(self, specs: Sequence[str]) -> None:
        checked = self._inputs.checked
        failed, self._left_out = check(specs, checked, lambda spec: self._measured(spec, checked, None, "checking"))
        self._fail(failed)
        if self._left_out:
            self._display.say(f"left out: {grouped(self._left_out)}")

    def _measure_cold_starts(self, specs: Sequence[str]) -> None:
        def first_batch(spec: str) -> Run:
            return self._measured(spec, self._inputs.timed, FIRST_BATCH, "first batch, no index")

        self._cold, failed = cold_starts(specs, first_batch, self._keep)
        self._fail(failed)

    def _measure_rounds(self, specs: Sequence[str]) -> list[Run]:
        pace, so_far = self._pace, list[Run]()
        timing = Timing(seconds=pace.seconds, warmup_s=pace.warmup_seconds)
        began = time.monotonic()

        def measure(spec: str) -> Run:
            place = f"round {len(so_far) // len(specs) + 1} of {pace.rounds}"
            if so_far:
                left_s = (time.monotonic() - began) / len(so_far) * (pace.rounds * len(specs) - len(so_far))
                place += f", {max(1, round(left_s / 60))} min to go"
            return self._measured(spec, self._inputs.timed, timing, place)

        def report(run: Run) -> None:
            self._keep(run)
            if run["attempt"]:
                so_far.pop()
            so_far.append(run)
            self._display.done(run, summarise(so_far, self._cold))

        runs, failed = take_turns(specs, pace.rounds, pace.attempts, measure, report)
        self._fail(failed)
        return runs

    def _publish(self, runs: list[Run], command: str) -> None:
        log = self._log
        summaries = summarise(runs, self._cold)
        facts = {
            "command": f"`{command}`",
            "shards": self._inputs.about,
            **facts_of(runs, self._failed, self._left_out),
        }
        self._display.finish(summaries, facts)
        log.with_suffix(".md").write_text(markdown(COLUMNS, map(Summary.cells, summaries), facts))
        chart.draw(summaries, log.with_suffix(".svg"))
        self._display.say(
            "written: " + ", ".join(str(log.with_suffix(suffix)) for suffix in (".md", ".jsonl", ".svg"))
        )


def warm_page_cache(shards: Iterable[str]) -> None:
    """Read every shard once, so that no candidate pays for the disk."""
    buffer = bytearray(8 << 20)
    for shard in shards:
        with open(shard, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
