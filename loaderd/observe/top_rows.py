"""What ``loaderd top`` shows of each stream: a row of figures. Pure functions of the samples of its page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from loaderd.observe.diagnose import diagnose_samples
from loaderd.observe.rates import Rates, rates_between
from loaderd.observe.remedies import Verdict
from loaderd.snapshots import Facts, Snapshot

_SECONDS = 3.5
"""About how many seconds rates cover: three samples."""


@dataclass(frozen=True)
class Row:
    """One stream. ``rates``: None until there are two samples."""

    pid: int
    name: str
    now: Snapshot
    facts: Facts
    rates: Rates | None
    verdict: Verdict
    """What determines how long a step takes: as in ``Diagnosis``."""
    is_old: bool
    """Whether its daemon has written nothing for some seconds."""

    @property
    def records_per_s(self) -> float:
        return self.rates.records / self.rates.over_s if self.rates else 0.0

    @property
    def steps_per_s(self) -> float:
        return self.rates.batches / self.rates.over_s if self.rates else 0.0

    @property
    def waiting(self) -> float:
        """The share of the time in which the consumer waits for batches."""
        return self.rates.wait_share if self.rates else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the end of the epoch; None if unknown."""
        left = self.facts.steps_per_epoch - self.now.batch
        return left / self.steps_per_s if self.steps_per_s and left >= 0 else None

    @property
    def workers(self) -> str:
        """What the workers do, as shares of their time, the largest first; or what they have no answer from."""
        rates = self.rates
        if rates is None:
            return ""
        if rates.outage is not None:
            return f"no answer for {rates.outage.for_s:.0f} s: {rates.outage.error}".rstrip(": ")
        worker_s = max(1e-12, rates.step_s * rates.facts.workers)
        shares = sorted(((s / worker_s, name) for name, s in rates.stage_s.items()), reverse=True)
        return " ".join(f"{name} {share:.0%}" for share, name in shares[:4] if share >= 0.01) or "idle"


def row_of(pid: int, name: str, samples: Sequence[Snapshot], facts: Facts, now_s: float) -> Row:
    """The row of a stream with at least one sample. ``now_s``: the present time, by the machine's monotonic clock."""
    now = samples[-1]
    recent = [one for one in samples if 0 < now.time_s - one.time_s <= _SECONDS]
    rates = rates_between(recent[0], now, facts) if recent else None
    verdict = diagnose_samples(samples, facts).verdict
    return Row(pid, name, now, facts, rates, verdict, now_s - now.time_s > _SECONDS)


def short(command: str) -> str:
    """A command line without its interpreter and its program's folder."""
    words = command.split()
    if len(words) > 1 and os.path.basename(words[0]).startswith("python"):
        del words[0]
    return " ".join([os.path.basename(words[0]), *words[1:]]) if words else ""
