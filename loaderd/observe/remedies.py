"""The cause, the one change that would help most, and its gain.

The gain is arithmetic. While the training waits, a step takes as long as its data take. With less work per batch, or
with more workers, data take less in proportion; but a step never gets shorter than the consumer's own part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loaderd.observe.rates import Rates
from loaderd.options import MAX_WORKERS

Verdict = Literal[
    "the model",
    "storage",
    "storage does not answer",
    "the servers do not answer",
    "workers",
    "one field",
    "too little CPU",
    "too few batches held",
    "copies to the device",
    "the consumer's Python",
    "nothing yet",
]

_MOUNTED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "9p", "virtiofs", "glusterfs", "beegfs", "fuse")
_NOTICEABLE = 0.1
_MOSTLY = 0.5


@dataclass(frozen=True)
class Remedy:
    """``gain``: the factor by which steps per second rise, at most."""

    cause: str = ""
    advice: str = ""
    gain: float = 1.0


def remedy_for(verdict: Verdict, limiting: str, found: Rates) -> Remedy:
    """The remedy for a verdict."""
    if verdict == "storage does not answer":
        return Remedy("", "Check that this machine reaches it: the network, the endpoint or region, the credentials.")
    if verdict == "the servers do not answer":
        return Remedy("", "Check that they run and that this machine reaches them.")
    if verdict == "the model":
        return _of_model(found)
    if verdict == "too little CPU":
        return _of_cpu(found)
    if verdict == "the consumer's Python":
        return _of_python(found)
    if verdict == "too few batches held":
        return _of_held_batches(found)
    if verdict == "copies to the device":
        return _of_copies(found)
    if found.is_starved:
        return _of_starving(found)
    if limiting == "inflate":
        return _of_inflating(found)
    if limiting == "read":
        return _of_reading(found)
    return _of_field(limiting, found) if verdict == "one field" else _of_workers(limiting, found)


def _gain(found: Rates, busy_s: float, workers: float) -> float:
    """The gain if a batch took ``busy_s`` seconds of work, and there were ``workers`` workers."""
    data_s = found.step_s * busy_s / max(1e-12, found.busy_s) * found.facts.workers / workers
    return found.step_s / max(found.own_s, data_s)


def _more_workers(found: Rates) -> int:
    """How many workers would be enough; as many as now, if they compute and no core is left.

    Four times as many at most, for beyond that something else may be the limit; and no more than a loader takes.
    """
    now = found.facts.workers
    most = now + math.floor(found.spare_cores + 0.5) if found.workers_compute else 4 * now
    return max(now, min(most, MAX_WORKERS, math.ceil(now * found.step_s / found.own_s)))


def _with_workers(found: Rates, workers: int, cause: str) -> Remedy:
    now = found.facts.workers
    advice = f"{_option(workers, found)} instead of {now}."
    if found.workers_compute:
        return Remedy(cause, advice, _gain(found, found.busy_s, min(workers, now + found.spare_cores)))
    # What they compute needs cores, too: as many more as are idle. How many they would get from others is not known.
    of_waiting = _gain(found, found.busy_s, workers)
    of_cores = 1 + found.spare_cores / max(1e-9, found.worker_cores)
    if of_cores < of_waiting and found.other_cores > _NOTICEABLE:
        return Remedy(cause, advice)
    return Remedy(cause, advice, min(of_cores, of_waiting))


def _option(workers: int, found: Rates) -> str:
    """How to ask for so many workers."""
    return f"`loaderd serve --workers {workers}`" if found.facts.of_server else f"workers={workers}"


def _of_starving(found: Rates) -> Remedy:
    cause = "the workers are busy with other consumers of the server"
    workers = _more_workers(found)
    return _with_workers(found, workers, cause) if workers > found.facts.workers else _of_cores(found, cause)


def _of_cores(found: Rates, cause: str) -> Remedy:
    more = min(found.facts.workers + 1, MAX_WORKERS)
    advice = f"Give it more than {found.facts.cores} cores, and {_option(more, found)}."
    return Remedy(cause, advice, _gain(found, found.busy_s, more))


def _of_model(found: Rates) -> Remedy:
    cause, advice = "batches are there before they are asked for", "Nothing in the loader makes it faster"
    if found.thread_is_busy:  # with a GPU or a TPU, or the verdict would be another
        cause += (
            "; the thread that takes them keeps a core busy, which may be Python code, or how it waits for the GPU"
        )
    enough = max(1, math.ceil(1.2 * found.busy_s / found.step_s))
    if enough < found.facts.workers and not found.facts.of_server:
        return Remedy(cause, f"{advice}; workers={enough} instead of {found.facts.workers} would do.")
    return Remedy(cause, f"{advice}.")


def _of_python(found: Rates) -> Remedy:
    python_s = min((found.thread_cpu + found.thread_delay) * found.step_s, found.own_s)
    data_s = found.data_s + python_s / found.facts.workers
    return Remedy(
        f"the thread that takes the batches computes for {python_s * 1e3:.1f} ms of each step, and nothing else of "
        "its process does much",
        "Have the workers do what it does with records: a loaderd.Derived field; or do it in another process.",
        found.step_s / max(found.step_s - python_s, data_s, 1e-12),
    )


def _of_held_batches(found: Rates) -> Remedy:
    more = 4 * found.facts.held_batches
    advice = f"held_batches={more} instead of {found.facts.held_batches}."
    if found.copy_s > found.wait_s:
        cause = f"more than held_batches={found.facts.held_batches} batches are held, so that others are copied"
        return Remedy(cause, advice, found.step_s / max(1e-12, found.step_s - found.copy_s))
    cause = f"the workers wait for slots {found.slot_share:.0%} of the time: batches are taken many at a time"
    return Remedy(cause, advice, found.step_s / max(found.own_s, found.data_s))


def _of_copies(found: Rates) -> Remedy:
    facts, copy_s = found.facts, found.device_s
    size, share = f"{facts.batch_bytes / (1 << 20):.1f} MiB", f"{copy_s / found.step_s:.0%} of the time"
    cause = f"whoever takes batches waits {copy_s * 1e3:.1f} ms for the copy of each, {size}: {share}"
    rest_s = found.own_s - copy_s
    if not found.now.copies_ahead:
        advice = "prefetch=2: batches are copied while the model works on the one before."
        return Remedy(cause, advice, found.step_s / max(rest_s, copy_s, found.data_s))
    if facts.has_bits and facts.packed_bytes < facts.batch_bytes:
        fewer = facts.packed_bytes / facts.batch_bytes
        advice = (
            f"Copy packed records, which are {1 / fewer:.0f} times smaller, and unpack them there: in TensorFlow "
            'by make_dataset(…, unpack="device") and loaderd_tf.unpack, else from fields of loaderd.Packed.'
        )
        return Remedy(cause, advice, found.step_s / max(rest_s + fewer * copy_s, found.data_s, 1e-9))
    half_s = max(rest_s + copy_s / 2, found.data_s, 1e-9)
    return Remedy(cause, "Choose a dtype of fewer bytes: of half as many, for this gain.", found.step_s / half_s)


def _of_inflating(found: Rates) -> Remedy:
    facts = found.facts
    cause = f"{facts.compressed} of {facts.shards} shards are compressed, and inflated anew for each window"
    busy_s = found.busy_s - found.stage_s["inflate"]
    return Remedy(cause, "Store the shards uncompressed.", _gain(found, busy_s, facts.workers))


def _of_reading(found: Rates) -> Remedy:
    facts = found.facts
    busy_s = found.busy_s - found.stage_s["read"]
    local = Remedy("", "Copy the shards to a local disk.", _gain(found, busy_s, facts.workers))
    far = [kind for kind in facts.storage if kind in _MOUNTED or "fuse" in kind]
    buckets = [kind for kind in facts.storage if kind in _BUCKETS]
    workers = _more_workers(found)
    if "servers" in facts.storage:
        return Remedy(
            "the servers, or the network to them, give records more slowly than they are used",
            'Add a server, if the servers are busy all the time; else send fewer bytes: compression="zstd".',
        )
    if buckets or far:
        cause = f"a slow bucket ({', '.join(buckets)})" if buckets else f"a slow mount ({', '.join(far)})"
        if workers > facts.workers:
            return _with_workers(found, workers, cause)
        return Remedy(cause, local.advice, local.gain)
    if found.memory_share > _NOTICEABLE:
        return Remedy(
            f"memory pressure: something waits for memory {found.memory_share:.0%} of the time, and what was read "
            "does not stay in the page cache",
            "Take smaller windows (shuffle=loaderd.Shuffle(window_records=…)), or more memory.",
            local.gain,
        )
    if found.fetched_share > _MOSTLY:
        return Remedy(
            f"a cold page cache: {found.fetched_share:.0%} of what is read comes from the disk",
            "Copy the shards to a faster disk, or give the machine the memory to keep them.",
            local.gain,
        )
    if workers > facts.workers:
        return _with_workers(found, workers, "")
    return Remedy("", "Copy the shards to a faster disk.", local.gain)


_COMPILED = {"unpack": 1 / 2, "check": 1 / 3, "parse": 1 / 4}
"""By stage, the share of its time that compiled code saves."""
_BUCKETS = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "http", "https")


def _of_field(name: str, found: Rates) -> Remedy:
    facts = found.facts
    part = found.stage_s[name] / max(1e-12, found.busy_s)
    ns = 1e9 * found.stage_s[name] * found.batches / max(1, found.records)
    cause = f"the function of {name!r} takes {ns:,.0f} ns a record, {part:.0%} of what the workers do"
    workers = _more_workers(found)
    if not found.workers_compute and workers > facts.workers:
        return _with_workers(found, workers, f"{cause}, and waits rather than computes")
    advice = f"Make the function of {name!r} cheaper, by numpy on whole arrays; or store what it gives in the shards."
    return Remedy(cause, advice, _gain(found, found.busy_s - found.stage_s[name], facts.workers))


def _of_workers(limiting: str, found: Rates) -> Remedy:
    facts, cause = found.facts, ""
    if found.memory_share > _NOTICEABLE:
        cause = f"memory pressure: something waits for memory for {found.memory_share:.0%} of the time"
    workers = _more_workers(found)
    if workers > facts.workers:
        return _with_workers(found, workers, cause)
    if limiting in _COMPILED and facts.has_bits and found.now.kernels == "numpy":
        busy_s = found.busy_s - sum(part * found.stage_s.get(stage, 0.0) for stage, part in _COMPILED.items())
        return Remedy(
            cause, "Install compiled code: pip install 'loaderd[compiled]'.", _gain(found, busy_s, facts.workers)
        )
    if limiting == "unpack" and facts.has_bits:
        busy_s = found.busy_s - 0.8 * found.stage_s["unpack"]
        advice = 'Unpack on the device: make_dataset(…, unpack="device"); or choose a dtype of fewer bytes.'
        return Remedy(cause, advice, _gain(found, busy_s, facts.workers))
    return _of_cores(found, cause)


def _of_cpu(found: Rates) -> Remedy:
    """No gain is promised: how much CPU there would be is others' affair."""
    facts, now = found.facts, found.now
    if found.throttled_share > _NOTICEABLE:
        cause = f"the cgroup is stopped for {found.throttled_share:.0%} of the time, its quota of CPU time being used"
        return Remedy(cause, "Raise the cgroup's quota (cpu.max; of a container, --cpus).")
    if found.stopped_share > _MOSTLY * found.lack_share:
        cause = f"the workers are stopped by a signal for {found.stopped_share:.0%} of the time"
        return Remedy(cause, "Look what stops them: cpulimit, a debugger, a scheduler of jobs.")
    lacks = {"workers": found.lack_share, "the thread that takes batches": found.thread_delay}
    causes = [
        f"{who} could run, and had no core, for {share:.0%} of the time"
        for who, share in lacks.items()
        if share > _NOTICEABLE
    ]
    if facts.workers > found.cores:
        causes.append(f"fewer cores than workers: {found.cores} and {facts.workers}")
    if found.other_cores > _NOTICEABLE:
        causes.append(f"others use {found.other_cores:.1f} of the {now.cores} cores that it may run on")
    if now.nice > 0:
        causes.append(f"the workers have the nice value {now.nice}, so others come first")
    return Remedy("; ".join(causes), "Give it more cores, or cores that nothing else uses.")
