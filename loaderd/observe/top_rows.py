"""What ``loaderd top`` shows of each stream: a row of figures. Pure functions of the samples of its page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loaderd.observe.diagnose import diagnose_samples
from loaderd.observe.rates import Rates, rates_between
from loaderd.observe.remedies import Verdict
from loaderd.snapshots import Facts, Snapshot

BAR_CELLS = 8
_STEPS = " ▏▎▍▌▋▊▉█"
_SECONDS = 3.5
"""About how many seconds rates cover: three samples."""


@dataclass(frozen=True)
class Row:
    """One stream. Rates are 0 until there are two samples."""

    pid: int
    name: str
    records_per_s: float
    steps_per_s: float
    waiting: float
    """Share of the time."""
    slots: float
    """The share of the slots that hold a batch."""
    windows: float
    """The share of the windows that are ready."""
    verdict: Verdict
    """What determines how long a step takes: as in ``Diagnosis``."""
    workers: str
    """What the workers do, as shares of their time, the largest first; or what they have no answer from."""
    workers_restarted: int
    damaged: int
    epoch: int
    batch: int
    steps_per_epoch: int
    left_s: float | None
    """Seconds until the end of the epoch; None if unknown."""
    is_old: bool
    """Whether its daemon has written nothing for some seconds."""


def row_of(pid: int, name: str, samples: Sequence[Snapshot], facts: Facts, now_s: float) -> Row:
    """The row of one stream. ``now_s``: the present time, by the machine's monotonic clock."""
    if not samples:
        return Row(pid, name, 0, 0, 0, 0, 0, "nothing yet", "", 0, 0, 0, 0, facts.steps_per_epoch, None, False)
    now = samples[-1]
    recent = [one for one in samples[:-1] if 0 < now.time_s - one.time_s <= _SECONDS]
    rates = rates_between(recent[0], now, facts) if recent else None
    steps_per_s = rates.batches / rates.over_s if rates else 0.0
    left = facts.steps_per_epoch - now.batch
    return Row(
        pid,
        name,
        rates.records / rates.over_s if rates else 0.0,
        steps_per_s,
        rates.wait_s / rates.step_s if rates else 0.0,
        now.slots_full / max(1, facts.slots),
        min(1.0, now.windows_ready / max(1, facts.windows)),
        diagnose_samples(samples, facts).verdict,
        "" if rates is None else _workers(rates),
        now.workers_restarted,
        now.damaged,
        now.epoch,
        now.batch,
        facts.steps_per_epoch,
        left / steps_per_s if steps_per_s and left >= 0 else None,
        now_s - now.time_s > _SECONDS,
    )


def short(command: str) -> str:
    """A command line without its interpreter and its program's folder."""
    words = command.split()
    if len(words) > 1 and os.path.basename(words[0]).startswith("python"):
        del words[0]
    return " ".join([os.path.basename(words[0]), *words[1:]]) if words else ""


def _workers(rates: Rates) -> str:
    if rates.outage is not None:
        return f"no answer for {rates.outage.for_s:.0f} s: {rates.outage.error}".rstrip(": ")
    worker_s = max(1e-12, rates.step_s * rates.facts.workers)
    shares = sorted(((s / worker_s, name) for name, s in rates.stage_s.items()), reverse=True)
    return " ".join(f"{name} {share:.0%}" for share, name in shares[:4] if share >= 0.01) or "idle"


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar of ``BAR_CELLS`` cells."""
    eighths = round(min(1.0, max(0.0, share)) * 8 * BAR_CELLS)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_STEPS[part] if part else "")).ljust(BAR_CELLS)


SORTS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "p": ("process", lambda row: row.pid),
    "r": ("rate", lambda row: -row.records_per_s),
    "w": ("waiting", lambda row: -row.waiting),
}
"""By key on the keyboard: the name of the order, and what rows are sorted by."""
