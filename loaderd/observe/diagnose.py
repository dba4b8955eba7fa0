"""Is the training waiting for data, why, and what would help? A pure function of two snapshots.

::

    step   = what the consumer does itself + what it waits for data          (all times are of one batch)
    data   = what all workers do for a batch / workers                       no step can be shorter than that
    advice = a change of one of them ──► the step would be the longer of the two ──► gain = step now / step then

The **limiting** stage is the one that takes most of the workers' time; where they mostly wait for windows, the one
that takes most of the loads. Copies to a device are limiting if the consumer waits longer for them than for data. The
consumer's own time is put down to Python if one thread of it kept a core busy throughout and the rest of the process
did little; but a thread that waits for a GPU keeps a core busy, too, as CUDA does by default. So that is not said
where the process has a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loaderd.observe.rates import Rates, rates_between
from loaderd.observe.remedies import Remedy, Verdict, remedy_for
from loaderd.snapshots import Facts, Snapshot

_BEGINNING_S = 0.9
_MIN_SECONDS = 1.4
_MIN_STUCK_S = 3.0
SECONDS = 5.5
"""How far back to look: five samples, one a second."""
_MIN_WAITING = 0.05
_MIN_COPYING = 0.05
COPY_TO_DEVICE = "copy to the device"
"""The only limiting stage that is not the workers'."""
_MIN_SLOT_WAITING = 0.25
_MOST_WINDOW_WAITING = 0.15
_LESS = 0.7
_MOSTLY_READING = 0.5
_SCARCE = 0.2


@dataclass(frozen=True)
class Diagnosis:
    """Whether a training waits for data, why, and what would help. From ``Loader.diagnose()``."""

    verdict: Verdict
    """What determines how long a step takes."""
    waiting_share: float
    """The share of the time, 0 to 1, in which the consumer waited for batches."""
    takes_ahead: bool
    """Whether batches are taken ahead of their use, as a ``tf.data.Dataset`` does. Then ``waiting_share`` is that of
    the thread that takes them: the training itself waited no longer than that, and maybe less."""
    waiting_spread: tuple[float, float]
    """The same share for single steps: one in ten waits less than the first number, one in ten more than the second.
    Single waits are known to a factor of two."""
    limiting_stage: str
    """The stage that takes the workers most time: "read", "inflate", "check", "parse", "unpack", or a derived field's
    name; or "copy to the device". "" if the training does not wait for data."""
    cause: str
    """Why that is so; "" if unknown."""
    advice: str
    """The one change that would help most; "" if there is none."""
    gain: float
    """By what factor the advice would raise the steps per second, at most. 1: not at all."""
    steps_per_s: float
    records_per_s: float
    stage_ns: dict[str, float]
    """Nanoseconds per record of the workers' time, by stage; their waits are "slot" and "window". Also, of
    the consumer's time, "copy to the device"."""
    over_s: float
    """How many seconds the figures cover."""
    outage_s: float = 0.0
    """For how many seconds storage, or the servers, have not answered; 0: they answer."""
    failed_requests: int = 0
    """Requests that have failed since then; each is made again."""
    last_error: str = ""
    """How the last of them failed."""

    @classmethod
    def _from_wire(cls, wire: Mapping[str, Any]) -> Diagnosis:
        """From what ``dataclasses.asdict`` made, maybe by a later version: fields unknown here are ignored."""
        values = {name: wire[name] for name in cls.__dataclass_fields__}
        low, high = values.pop("waiting_spread")
        return cls(waiting_spread=(low, high), **values)

    def __str__(self) -> str:
        """The diagnosis in a few sentences."""
        if self.verdict == "nothing yet":
            return f"Nothing yet: {self.cause}"
        at_most = "up to " if self.takes_ahead else ""
        lines = [f"{_HEADLINES[self.verdict]} It waits for data for {at_most}{self.waiting_share:.0%} of the time."]
        if self.limiting_stage:
            lines.append(f"Limiting stage: {self.limiting_stage}.")
        lines += [f"Cause: {self.cause}."] if self.cause else []
        if self.advice:
            gain = f" At most {self.gain:.2f} times the steps a second." if self.gain > 1 else ""
            lines.append(f"Advice: {self.advice}{gain}")
        return "\n".join(lines)


_HEADLINES: dict[Verdict, str] = {
    "the model": "The training is as fast as its model.",
    "storage": "The training waits for storage.",
    "storage does not answer": "The training waits for storage, which does not answer.",
    "the servers do not answer": "The training waits for its servers, which do not answer.",
    "workers": "The training waits for the workers.",
    "one field": "The training waits for one field.",
    "too little CPU": "The training gets too little of the CPU.",
    "too few batches held": "The training needs room for more batches.",
    "copies to the device": "The training waits for copies to the device.",
    "the consumer's Python": "The training is as fast as its own Python code.",
    "nothing yet": "",
}


def diagnose(before: Snapshot, now: Snapshot, facts: Facts) -> Diagnosis:
    """Compare two snapshots of a stream, ``now`` being the later one."""
    if now.time_s <= before.time_s:
        return nothing_yet("there is no second moment to compare with")
    rates = rates_between(before, now, facts)
    if rates.outage is not None and rates.wait_share >= _MIN_WAITING:
        is_of_servers = "servers" in facts.storage
        verdict: Verdict = "the servers do not answer" if is_of_servers else "storage does not answer"
        return _diagnosis(rates, verdict, "", remedy_for(verdict, "", rates), _spread(before, now, rates))
    if rates.batches < 2 and rates.wait_s < 0.5 * rates.over_s:
        return nothing_yet(f"{rates.batches} batches were taken in {rates.over_s:.1f} s", rates.over_s)
    is_known = rates.is_known or rates.is_starved or rates.workers_lack_cpu
    if rates.wait_s > 0.5 * rates.step_s and not is_known:
        others, process = (" or at other consumers'", "server") if facts.of_server else ("", "daemon")
        return nothing_yet(
            f"the consumer waits, and the workers have been at the same tasks{others} for most of "
            f"{rates.over_s:.1f} s. What they do is counted when it is done; `pkill -USR1 loaderd-{process}` prints "
            "what each is at now",
            rates.over_s,
        )
    verdict = _verdict(rates)
    limiting = rates.limiting if verdict in ("storage", "workers", "one field") and not rates.is_starved else ""
    if verdict == "copies to the device":
        limiting = COPY_TO_DEVICE
    remedy = remedy_for(verdict, limiting, rates)
    return _diagnosis(rates, verdict, limiting, remedy, _spread(before, now, rates))


def _diagnosis(
    rates: Rates, verdict: Verdict, limiting: str, remedy: Remedy, spread: tuple[float, float]
) -> Diagnosis:
    outage = rates.outage
    causes = [remedy.cause]
    if verdict in ("storage", "workers", "one field", "too few batches held") and rates.lack_share > _SCARCE:
        causes.append(f"cores are scarce: workers could run, and had none, for {rates.lack_share:.0%} of the time")
    if outage is not None:
        causes.append(outage.in_words(rates.facts.source))
    per_record = 1e9 * rates.batches / max(1, rates.records)
    worker_s = rates.step_s * rates.facts.workers
    waits_s = {"slot": rates.slot_share * worker_s, "window": rates.window_share * worker_s}
    if rates.device_s:
        waits_s[COPY_TO_DEVICE] = rates.device_s
    return Diagnosis(
        verdict=verdict,
        waiting_share=rates.wait_share,
        takes_ahead=rates.now.takes_ahead,
        waiting_spread=spread,
        limiting_stage=limiting,
        cause="; ".join(filter(None, causes)),
        advice=remedy.advice,
        gain=max(1.0, remedy.gain),
        steps_per_s=rates.batches / rates.over_s,
        records_per_s=rates.records / rates.over_s,
        stage_ns={name: s * per_record for name, s in (rates.stage_s | waits_s).items()},
        over_s=rates.over_s,
        outage_s=0.0 if outage is None else outage.for_s,
        failed_requests=0 if outage is None else outage.failures,
        last_error="" if outage is None else outage.error,
    )


def _verdict(rates: Rates) -> Verdict:
    if rates.copy_s > _MIN_COPYING * rates.step_s:
        return "too few batches held"
    if rates.device_s > max(_MIN_COPYING * rates.step_s, rates.wait_s):
        return "copies to the device"
    waits = rates.wait_share >= _MIN_WAITING
    if (waits and rates.workers_lack_cpu) or rates.consumer_lacks_cpu:
        return "too little CPU"
    if not waits:
        is_python = rates.thread_is_busy and not rates.now.uses_accelerator
        return "the consumer's Python" if is_python else "the model"
    if rates.is_starved:
        return "workers"
    if _comes_in_bursts(rates):
        return "too few batches held"
    limiting = rates.limiting
    if limiting in rates.facts.derived:
        return "one field"
    return "storage" if limiting in ("read", "inflate") else "workers"


def _comes_in_bursts(rates: Rates) -> bool:
    """Whether batches are taken in bursts, so that consumer and workers wait in turn, and more slots would help.

    Slow windows look alike; but then the consumer waits much longer, and the workers wait for windows. Where an epoch
    is one window, they do not: while one of them reads the next, the others wait for slots of this one.
    """
    if rates.stage_s["read"] > _MOSTLY_READING * rates.busy_s:
        return False
    waiting = rates.wait_share
    wait_for_slots = rates.slot_share > max(_MIN_SLOT_WAITING, _LESS * waiting)
    return wait_for_slots and rates.window_share < _MOST_WINDOW_WAITING * waiting


def _spread(before: Snapshot, now: Snapshot, rates: Rates) -> tuple[float, float]:
    """The share of a step spent waiting: the 10th and the 90th percentile over the steps."""
    waits = [new - old for old, new in zip(before.waits, now.waits, strict=True)]
    counts = [max(0, rates.batches - sum(waits)), *waits]  # steps without a wait come first

    def share_at(rank: float) -> float:
        passed = 0
        for number, count in enumerate(counts):
            passed += count
            if passed > rank:
                wait_s = 0.0 if number == 0 else 0.75e-9 * (4096 << (number - 1))  # the middle of its bin
                return wait_s / (wait_s + rates.own_s)
        return 0.0

    return share_at(0.1 * sum(counts)), share_at(0.9 * sum(counts))


def nothing_yet(why: str, over_s: float = 0.0) -> Diagnosis:
    """The diagnosis where too little is known."""
    return Diagnosis("nothing yet", 0.0, False, (0.0, 0.0), "", f"{why}.", "", 1.0, 0.0, 0.0, {}, over_s)


def diagnose_samples(samples: Sequence[Snapshot], facts: Facts) -> Diagnosis:
    """Compare the first and the last of recent samples (one a second, oldest first) in which batches were taken."""
    with_batches = [sample for sample in samples if sample.batches > 0]
    if with_batches and (with_batches[0] is not samples[0] or with_batches[0].number == 0):
        # Leave out the first second of a run: start-up is not what the user asks about.
        with_batches = [sample for sample in with_batches if sample.time_s - with_batches[0].time_s > _BEGINNING_S]
    waited_s = 0.0 if not samples else samples[-1].wait_s - samples[0].wait_s
    if not with_batches and waited_s > _MIN_STUCK_S:  # it still waits for the first batch
        with_batches = list(samples)
    recent = [sample for sample in with_batches if with_batches[-1].time_s - sample.time_s <= SECONDS]
    if not recent or recent[-1].time_s - recent[0].time_s < _MIN_SECONDS:
        return nothing_yet("batches have come for less than three seconds")
    return diagnose(recent[0], recent[-1], facts)
