"""What happened between two snapshots of a stream, as figures of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loaderd.snapshots import Facts, Outage, Snapshot

_LOADING = ("read", "inflate", "check", "parse")
_MIN_WINDOW_WAITING = 0.4
_COMPUTING = 0.5
_MIN_KNOWN = 0.3
_BUSY_CPU = 0.8
_BUSY_ALONE = 0.2
_MIN_OUTAGE_S = 3.0


@dataclass(frozen=True)
class Rates:
    """What happened between two snapshots. Times (``…_s``) are seconds per batch, shares are from 0 to 1."""

    facts: Facts
    now: Snapshot
    over_s: float
    batches: int
    records: int
    step_s: float
    wait_s: float
    copy_s: float
    device_s: float
    """What the consumer waited for copies to a device."""
    stage_s: dict[str, float]
    """Work by stage, of all workers together."""
    slot_share: float
    """The share of the workers' time in which they waited for slots."""
    window_share: float
    """The share in which they waited for windows."""
    worker_cpu_share: float
    """The share of the workers' busy time in which they had a core."""
    delay_share: float
    """The share of it in which they could have run, but had no core."""
    thread_cpu: float
    """How many cores the consumer's busiest thread used: 1 is all the time."""
    thread_delay: float
    """How many cores it could have used besides, but did not get."""
    other_cpu: float
    """How many cores the rest of its process used."""
    spare_cores: float
    """How many idle cores this cgroup could have used."""
    throttled_share: float
    """The share of time for which the cgroup was stopped by its CPU quota."""
    memory_share: float
    """The share of time in which some process waited for memory."""
    fetched_share: float
    """The share of the bytes read that was not in the page cache."""

    @property
    def outage(self) -> Outage | None:
        """An outage that has lasted for some seconds; None: storage answers, or a request takes long."""
        outage = self.now.outage
        return outage if outage is not None and outage.for_s >= _MIN_OUTAGE_S else None

    @property
    def own_s(self) -> float:
        """What the consumer does itself for a batch."""
        return max(1e-9, self.step_s - self.wait_s)

    @property
    def busy_s(self) -> float:
        """What all workers do for a batch."""
        return sum(self.stage_s.values())

    @property
    def data_s(self) -> float:
        """The time that the workers need for a batch, if all of them work: no step can be shorter."""
        return self.busy_s / self.facts.workers

    @property
    def known_share(self) -> float:
        """The share of the workers' time of which it is known what it was: a task counts when it is done."""
        worked_s = sum(max(0.0, s) for s in self.stage_s.values())
        return worked_s / self.facts.workers / self.step_s + self.slot_share + self.window_share

    @property
    def is_known(self) -> bool:
        """Whether enough is known of the workers' time to say what they do."""
        return self.known_share >= _MIN_KNOWN

    @property
    def is_starved(self) -> bool:
        """Whether the workers are a server's, and busy with its other consumers: tasks of this one do end."""
        return self.facts.of_server and not self.is_known and self.batches > 1

    @property
    def thread_is_busy(self) -> bool:
        """Whether one thread of the consumer keeps a core busy all the time it has, and the rest does little."""
        own_cores = (self.thread_cpu + self.thread_delay) / (self.own_s / self.step_s)
        return own_cores > _BUSY_CPU and self.other_cpu < _BUSY_ALONE * self.thread_cpu

    @property
    def workers_compute(self) -> bool:
        """Whether workers are busy computing, rather than waiting for something such as storage."""
        return self.worker_cpu_share + self.delay_share > _COMPUTING

    @property
    def limiting(self) -> str:
        """The stage that takes most time; only stages of loading count where workers wait for windows."""
        of = _LOADING if self.window_share > _MIN_WINDOW_WAITING else tuple(self.stage_s)
        return max(of, key=lambda stage: self.stage_s.get(stage, 0.0))


def rates(before: Snapshot, now: Snapshot, facts: Facts) -> Rates:
    """The rates between two snapshots of one stream; ``now`` must be later than ``before``."""
    over_s = now.time_s - before.time_s
    batches, records = now.batches - before.batches, now.records - before.records
    per_batch = 1 / max(1, batches)
    stages = {name: now.stage_s[name] - before.stage_s[name] for name in now.stage_s}
    fields = {name: now.field_s[name] - before.field_s[name] for name in now.field_s}
    by_stage = _work_s(stages, fields, facts)
    busy_s = max(1e-9, sum(by_stage.values()))
    asked = now.asked_bytes - before.asked_bytes
    worker_s = over_s * facts.workers
    if facts.of_server:  # the workers' time on a core is that for all consumers; so is the rest of their time
        busy_s = max(busy_s, worker_s - stages["slot"] - stages["window"])
    consumer_cpu = (now.consumer_cpu_s - before.consumer_cpu_s) / over_s
    worker_cpu = (now.worker_cpu_s - before.worker_cpu_s) / over_s
    idle = (now.idle_s - before.idle_s) / over_s
    thread_cpu = (now.thread_cpu_s - before.thread_cpu_s) / over_s
    return Rates(
        facts=facts,
        now=now,
        over_s=over_s,
        batches=batches,
        records=records,
        step_s=over_s * per_batch,
        wait_s=min(over_s, now.wait_s - before.wait_s) * per_batch,
        copy_s=(now.copy_s - before.copy_s) * per_batch,
        device_s=(now.device_wait_s - before.device_wait_s) * per_batch,
        stage_s={name: s * per_batch for name, s in by_stage.items()},
        slot_share=stages["slot"] / worker_s,
        window_share=stages["window"] / worker_s,
        worker_cpu_share=min(1.0, (now.worker_cpu_s - before.worker_cpu_s) / busy_s),
        delay_share=min(1.0, (now.delay_s - before.delay_s) / busy_s),
        thread_cpu=thread_cpu,
        thread_delay=(now.thread_delay_s - before.thread_delay_s) / over_s,
        other_cpu=max(0.0, consumer_cpu - thread_cpu),
        spare_cores=min(idle, max(0.0, facts.cores - consumer_cpu - worker_cpu)),
        throttled_share=min(1.0, (now.throttled_s - before.throttled_s) / over_s),
        memory_share=min(1.0, (now.memory_stall_s - before.memory_stall_s) / over_s),
        fetched_share=min(1.0, (now.fetched_bytes - before.fetched_bytes) / asked) if asked > 1 << 16 else 0.0,
    )


def _work_s(stages: Mapping[str, float], fields: Mapping[str, float], facts: Facts) -> dict[str, float]:
    """Seconds of work by the stages that users are told of; derived fields have names of their own."""
    return {
        "read": stages["read"],
        "inflate": stages["inflate"],
        "check": stages["frames"] + stages["check"],
        "parse": stages["parse"] + stages["order"],
        "unpack": stages["fill"] + sum(s for name, s in fields.items() if name not in facts.derived),
        **{name: s for name, s in fields.items() if name in facts.derived},
    }
