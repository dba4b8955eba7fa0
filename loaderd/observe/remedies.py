"""The cause, the one change that would help most, and its gain.

The gain is arithmetic. While the training waits, a step takes as long as its data take. With less work per batch, or
with more workers, data take less in proportion. But a step never gets shorter than the consumer's own part of it, nor
than the CPU time that workers and consumer need for it on the cores that they use and those that are idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from loaderd.errors import install_hint
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


def remedy_for(verdict: Verdict, limiting: str, rates: Rates) -> Remedy:
    """The remedy for a verdict."""
    if verdict in _REMEDIES:
        return _REMEDIES[verdict](rates)
    if rates.is_starved:
        return _for_starving(rates)
    if verdict == "storage":
        return _for_inflating(rates) if limiting == "inflate" else _for_reading(rates)
    return _for_field(limiting, rates) if verdict == "one field" else _for_workers(limiting, rates)


def _gain(rates: Rates, least_s: float, *, saved_s: float = 0.0, more_cores: float = 0.0) -> float:
    """The gain if a step took ``least_s``, or as long as the cores need for it.

    ``saved_s``: work of a batch that the workers would no longer do. ``more_cores``: cores besides those that the
    training uses and those that are idle.
    """
    if rates.lacks_cores_of_others:
        return 1.0
    cores = rates.own_cores + rates.spare_cores + more_cores
    cores_s = (rates.own_cores * rates.step_s - rates.worker_cpu_share * saved_s) / max(1e-9, cores)
    return rates.step_s / max(least_s, cores_s, 1e-9)


def _gain_of_data(rates: Rates, saved_s: float = 0.0, more_workers: int = 0, more_cores: float = 0.0) -> float:
    """The gain if the workers had ``saved_s`` less to do for a batch, or were more."""
    workers = rates.facts.workers
    data_s = rates.step_s * (1 - saved_s / max(1e-9, rates.busy_s)) * workers / (workers + more_workers)
    return _gain(rates, max(rates.own_s, data_s), saved_s=saved_s, more_cores=more_cores)


def _more_workers(rates: Rates, cause: str) -> Remedy | None:
    """As many workers as would be enough; None if they compute and no core is left.

    Four times as many at most, for beyond that something else may be the limit; and no more than a loader takes.
    """
    now = rates.facts.workers
    most = now + math.floor(rates.spare_cores + 0.5) if rates.workers_compute else 4 * now
    workers = min(most, MAX_WORKERS, math.ceil(now * rates.step_s / rates.own_s))
    if workers <= now:
        return None
    advice = f"{_option(workers, rates)} instead of {now}."
    return Remedy(cause, advice, _gain_of_data(rates, more_workers=workers - now))


def _option(workers: int, rates: Rates) -> str:
    return f"`loaderd serve --workers {workers}`" if rates.facts.of_server else f"workers={workers}"


def _for_starving(rates: Rates) -> Remedy:
    cause = "the workers are busy with other consumers of the server"
    return _more_workers(rates, cause) or _for_cores(rates, cause)


def _for_cores(rates: Rates, cause: str) -> Remedy:
    more = min(rates.facts.workers + 1, MAX_WORKERS)
    advice = f"Give it more than {rates.facts.cores} cores, and {_option(more, rates)}."
    return Remedy(cause, advice, _gain_of_data(rates, more_workers=more - rates.facts.workers, more_cores=1))


def _for_model(rates: Rates) -> Remedy:
    cause, advice = "batches are there before they are asked for", "Nothing in the loader makes it faster"
    if rates.thread_is_busy:  # with a GPU or a TPU, or the verdict would be another
        cause += (
            "; the thread that takes them keeps a core busy, which may be Python code, or how it waits for the GPU"
        )
    enough = max(1, math.ceil(1.2 * rates.busy_s / rates.step_s))
    if enough < rates.facts.workers and not rates.facts.of_server:
        return Remedy(cause, f"{advice}; workers={enough} instead of {rates.facts.workers} would do.")
    return Remedy(cause, f"{advice}.")


def _for_python(rates: Rates) -> Remedy:
    python_s = min((rates.thread_cpu + rates.thread_delay) * rates.step_s, rates.own_s)
    data_s = rates.data_s + python_s / rates.facts.workers
    return Remedy(
        f"the thread that takes the batches computes for {python_s * 1e3:.1f} ms of each step, and nothing else of "
        "its process does much",
        "Have the workers do what it does with records: a loaderd.Derived field; or do it in another process.",
        _gain(rates, max(rates.step_s - python_s, data_s)),
    )


def _for_held_batches(rates: Rates) -> Remedy:
    more = 4 * rates.facts.held_batches
    advice = f"held_batches={more} instead of {rates.facts.held_batches}."
    if rates.copy_s > rates.wait_s:
        cause = f"more than held_batches={rates.facts.held_batches} batches are held, so that others are copied"
        return Remedy(cause, advice, _gain(rates, rates.step_s - rates.copy_s))
    cause = f"the workers wait for slots {rates.slot_share:.0%} of the time: batches are taken many at a time"
    return Remedy(cause, advice, _gain(rates, max(rates.own_s, rates.data_s)))


def _for_copies(rates: Rates) -> Remedy:
    facts, copy_s = rates.facts, rates.device_s
    size, share = f"{facts.batch_bytes / (1 << 20):.1f} MiB", f"{copy_s / rates.step_s:.0%} of the time"
    cause = f"whoever takes batches waits {copy_s * 1e3:.1f} ms for the copy of each, {size}: {share}"
    other_s = rates.own_s - copy_s
    if not rates.now.copies_ahead:
        advice = "prefetch=2: batches are copied while the model works on the one before."
        return Remedy(cause, advice, _gain(rates, max(other_s, copy_s, rates.data_s)))
    if facts.has_bits and facts.packed_bytes < facts.batch_bytes:
        fewer = facts.packed_bytes / facts.batch_bytes
        advice = (
            f"Copy packed records, which are {1 / fewer:.0f} times smaller, and unpack them there: "
            'unpack="device"; what make_dataset gives is then for loaderd_tf.unpack.'
        )
        return Remedy(cause, advice, _gain(rates, max(other_s + fewer * copy_s, rates.data_s)))
    half = _gain(rates, max(other_s + copy_s / 2, rates.data_s))
    return Remedy(cause, "Choose a dtype of fewer bytes: of half as many, for this gain.", half)


def _for_inflating(rates: Rates) -> Remedy:
    facts = rates.facts
    cause = f"{facts.compressed} of {facts.shards} shards are compressed, and inflated anew for each window"
    return Remedy(cause, "Store the shards uncompressed.", _gain_of_data(rates, rates.stage_s["inflate"]))


def _for_reading(rates: Rates) -> Remedy:
    """Whether storage gives more to those who ask for more is not known: only for reading less is a gain promised."""
    facts = rates.facts
    gain = _gain_of_data(rates, rates.stage_s["read"])
    if "servers" in facts.storage:
        return Remedy(
            "the servers, or the network to them, give records more slowly than they are used",
            "Add a server, if the servers are busy all the time; else choose a dtype of fewer bytes.",
        )
    if buckets := [kind for kind in facts.storage if kind in _BUCKETS]:
        return Remedy(
            f"a slow bucket ({', '.join(buckets)})",
            "Take larger windows (shuffle=loaderd.Shuffle(window_records=…)): workers ask for all of a window at "
            "once, so more of them do not help. Or copy the shards to a local disk, for this gain.",
            gain,
        )
    cause = ""
    if far := [kind for kind in facts.storage if kind in _MOUNTED or "fuse" in kind]:
        cause = f"a slow mount ({', '.join(far)})"
    elif rates.memory_share > _NOTICEABLE:
        return Remedy(
            f"memory pressure: something waits for memory {rates.memory_share:.0%} of the time, and what was read "
            "does not stay in the page cache",
            "Take smaller windows (shuffle=loaderd.Shuffle(window_records=…)), or more memory.",
            gain,
        )
    elif rates.fetched_share > _MOSTLY:
        return Remedy(
            f"a cold page cache: {rates.fetched_share:.0%} of what is read comes from the disk",
            "Copy the shards to a faster disk, or give the machine the memory to keep them.",
            gain,
        )
    if more := _more_workers(rates, cause):
        return replace(more, gain=1.0)
    return Remedy(cause, f"Copy the shards to a {'local' if far else 'faster'} disk.", gain)


_COMPILED = {"unpack": 1 / 2, "check": 1 / 3, "parse": 1 / 4}
"""By stage, the share of its time that compiled code saves."""
_BUCKETS = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "http", "https")


def _for_field(name: str, rates: Rates) -> Remedy:
    part = rates.stage_s[name] / max(1e-12, rates.busy_s)
    ns = 1e9 * rates.stage_s[name] * rates.batches / max(1, rates.records)
    cause = f"the function of {name!r} takes {ns:,.0f} ns a record, {part:.0%} of what the workers do"
    if not rates.workers_compute and (more := _more_workers(rates, f"{cause}, and waits rather than computes")):
        return more
    advice = f"Make the function of {name!r} cheaper, by numpy on whole arrays; or store what it gives in the shards."
    return Remedy(cause, advice, _gain_of_data(rates, rates.stage_s[name]))


def _for_workers(limiting: str, rates: Rates) -> Remedy:
    facts, cause = rates.facts, ""
    if rates.memory_share > _NOTICEABLE:
        cause = f"memory pressure: something waits for memory for {rates.memory_share:.0%} of the time"
    if more := _more_workers(rates, cause):
        return more
    if limiting in _COMPILED and facts.has_bits and rates.now.kernels == "numpy":
        saved_s = sum(part * rates.stage_s.get(stage, 0.0) for stage, part in _COMPILED.items())
        gain = _gain_of_data(rates, saved_s)
        return Remedy(cause, f"Install compiled code: {install_hint('compiled')}.", gain)
    if limiting == "unpack" and facts.has_bits and rates.now.uses_accelerator:
        advice = 'Unpack on the device: unpack="device"; or choose a dtype of fewer bytes.'
        return Remedy(cause, advice, _gain_of_data(rates, 0.8 * rates.stage_s["unpack"]))
    return _for_cores(rates, cause)


def _for_cpu(rates: Rates) -> Remedy:
    """No gain is promised: how much CPU there would be is others' affair."""
    facts, now = rates.facts, rates.now
    if rates.throttled_share > _NOTICEABLE:
        cause = f"the cgroup is stopped for {rates.throttled_share:.0%} of the time, its quota of CPU time being used"
        return Remedy(cause, "Raise the cgroup's quota (cpu.max; of a container, --cpus).")
    if rates.stopped_share > _MOSTLY * rates.lack_share:
        cause = f"the workers are stopped by a signal for {rates.stopped_share:.0%} of the time"
        return Remedy(cause, "Look what stops them: cpulimit, a debugger, a scheduler of jobs.")
    lacks = {"workers": rates.lack_share, "the thread that takes batches": rates.thread_delay}
    causes = [
        f"{who} could run, and had no core, for {share:.0%} of the time"
        for who, share in lacks.items()
        if share > _NOTICEABLE
    ]
    if facts.workers > rates.cores:
        causes.append(f"fewer cores than workers: {rates.cores} and {facts.workers}")
    if rates.other_cores > _NOTICEABLE:
        causes.append(f"others use {rates.other_cores:.1f} of the {now.cores} cores that it may run on")
    if now.nice > 0:
        causes.append(f"the workers have the nice value {now.nice}, so others come first")
    return Remedy("; ".join(causes), "Give it more cores, or cores that nothing else uses.")


_REMEDIES: dict[Verdict, Callable[[Rates], Remedy]] = {
    "storage does not answer": lambda rates: Remedy(
        "", "Check that this machine reaches it: the network, the endpoint or region, the credentials."
    ),
    "the servers do not answer": lambda rates: Remedy("", "Check that they run and that this machine reaches them."),
    "the model": _for_model,
    "too little CPU": _for_cpu,
    "the consumer's Python": _for_python,
    "too few batches held": _for_held_batches,
    "copies to the device": _for_copies,
}
"""What helps where the verdict alone says it."""
