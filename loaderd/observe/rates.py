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
_MIN_LACK = 0.1
_EXPLAINS = 0.5
_MIN_LACKING = 0.3
_ALL_CORES = 0.8
_MIN_DELAY = 0.2
_SCARCE = 0.2
_OTHERS = 0.1


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
    """The share of it in which they could have run, but had no core; more than 1, as they wake up late, too."""
    lack_share: float
    """The share of all of the workers' time in which they could not run: no core was free, or they were stopped."""
    stopped_share: float
    """The share in which they were stopped by a signal."""
    own_cores: float
    """How many cores the workers and the consumer used."""
    other_cores: float
    """How many of the cores that the workers may run on were used by others."""
    cores: int
    """Cores that the workers may use now, by their affinity and the cgroup's quota."""
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
    def is_known(self) -> bool:
        """Whether enough of the workers' time is known to say what they do: a task counts when it is done."""
        return self.data_s / self.step_s + self.slot_share + self.window_share >= _MIN_KNOWN

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
        return self.worker_cpu_share + self.delay_share + self.stopped_share > _COMPUTING

    @property
    def wait_share(self) -> float:
        """The share of the time in which the consumer waits for data."""
        return self.wait_s / self.step_s

    @property
    def workers_lack_cpu(self) -> bool:
        """Whether the consumer waits because workers cannot run when they could, and not for what they do.

        Where they and the consumer use up all cores by themselves, it is what they do, unless there are more workers
        than cores. So it is where the training would still wait for a stage that can go (a read, inflating, a field)
        if they could run all the time.
        """
        wanted_share = self.lack_share + self.worker_cpu_share * self.busy_s / (self.facts.workers * self.step_s)
        explains = self.lack_share >= max(_MIN_LACK, _EXPLAINS * self.wait_share)
        if self.own_cores > _ALL_CORES * self.cores:
            return self.facts.workers > self.cores
        if not explains or self.lack_share < _MIN_LACKING * wanted_share:
            return False
        lack_s = self.lack_share * self.facts.workers * self.step_s
        goes_s = self.stage_s[self.limiting] if self.limiting in ("read", "inflate", *self.facts.derived) else 0.0
        return goes_s < lack_s

    @property
    def lacks_cores_of_others(self) -> bool:
        """Whether workers lack cores that others use: how much of them these would leave is not known."""
        return self.lack_share > _SCARCE and self.other_cores > _OTHERS

    @property
    def consumer_lacks_cpu(self) -> bool:
        """Whether the consumer's thread waits for a core for longer than it has one, and than it waits for data."""
        return self.thread_delay > max(_MIN_DELAY, self.thread_cpu, self.wait_share)

    @property
    def limiting(self) -> str:
        """The stage that takes most time; only stages of loading count where workers wait for windows."""
        stages = _LOADING if self.window_share > _MIN_WINDOW_WAITING else tuple(self.stage_s)
        return max(stages, key=lambda stage: self.stage_s.get(stage, 0.0))


def rates_between(before: Snapshot, now: Snapshot, facts: Facts) -> Rates:
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
    cores = min(facts.cores, now.cores or facts.cores)
    idle = (now.idle_s - before.idle_s) / over_s
    own_cores = consumer_cpu + (now.worker_cpu_s - before.worker_cpu_s) / over_s
    throttled_share = min(1.0, (now.throttled_s - before.throttled_s) / over_s)
    stopped_s = _stopped_s(before, now, by_stage)
    delayed_share = (now.delay_s - before.delay_s + stopped_s) / worker_s
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
        delay_share=(now.delay_s - before.delay_s) / busy_s,
        lack_share=min(1.0, max(delayed_share, throttled_share)),
        stopped_share=min(1.0, stopped_s / worker_s),
        own_cores=own_cores,
        other_cores=max(0.0, now.cores - idle - own_cores),
        cores=cores,
        thread_cpu=thread_cpu,
        thread_delay=(now.thread_delay_s - before.thread_delay_s) / over_s,
        other_cpu=max(0.0, consumer_cpu - thread_cpu),
        spare_cores=min(idle, max(0.0, cores - own_cores)),
        throttled_share=throttled_share,
        memory_share=min(1.0, (now.memory_stall_s - before.memory_stall_s) / over_s),
        fetched_share=min(1.0, (now.fetched_bytes - before.fetched_bytes) / asked) if asked > 1 << 16 else 0.0,
    )


def _stopped_s(before: Snapshot, now: Snapshot, by_stage: Mapping[str, float]) -> float:
    """For how long workers were stopped. Where they were at all, that is why they took time and had no core."""
    seen_s = now.stopped_s - before.stopped_s
    computing_s = sum(by_stage[stage] for stage in ("inflate", "check", "parse", "unpack"))
    ran_s = now.worker_cpu_s - before.worker_cpu_s + now.delay_s - before.delay_s
    return max(seen_s, computing_s - ran_s) if seen_s > 0 else 0.0


def _work_s(stages: Mapping[str, float], fields: Mapping[str, float], facts: Facts) -> dict[str, float]:
    """Seconds of work by the stages that users are told of; derived fields have names of their own."""
    seconds = {
        "read": stages["read"],
        "inflate": stages["inflate"],
        "check": stages["frames"] + stages["check"],
        "parse": stages["parse"] + stages["order"],
        "unpack": stages["fill"] + sum(s for name, s in fields.items() if name not in facts.derived),
        **{name: s for name, s in fields.items() if name in facts.derived},
    }
    # A field may seem to take longer than what it is a part of: that is counted when it is done.
    return {name: max(0.0, s) for name, s in seconds.items()}
