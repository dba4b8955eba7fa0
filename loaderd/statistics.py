"""What a loader says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loaderd.errors import Damage

Kernels = Literal["numpy", "compiled"]


@dataclass(frozen=True)
class StorageCounts:
    """What workers asked of storage that URIs name. Files on this machine's own paths are not counted."""

    requests: int = 0
    """Requests that were answered: looks at an object, and reads of a part of one."""
    bytes: int = 0
    """Bytes received."""
    retries: int = 0
    """Requests that were made again after a failure."""
    cache_hits: int = 0
    """Parts of shards (of 256 KiB) that were read from ``Storage.cache_dir``."""
    cache_misses: int = 0
    """Parts that ``Storage.cache_dir`` did not hold, and that were fetched."""


@dataclass(frozen=True)
class Statistics:
    """Counts since the loader was made, and the sizes that it works with. From ``Loader.statistics()``."""

    num_shards: int
    """Shards, empty ones included."""
    num_records: int
    """Records of one epoch of all hosts, damaged ones left out."""
    batches_delivered: int
    """Batches that the consumer took."""
    records_delivered: int
    """Records in them."""
    batches_copied: int
    """Batches that were copied, because the consumer held so many that slots would have run out."""
    starts: int
    """How often the workers began at another batch than the next one: at each pass, and at each jump within one."""
    wait_s: float
    """Seconds that the consumer waited for a batch."""
    device_wait_s: float
    """Seconds that it waited for copies of batches to a device, too. Where a ``tf.data.Dataset`` copies, this is an
    estimate: the number of copies, times what one took when the data set was made."""
    records_skipped: int
    """Records left out of batches for damage that the index pass did not see. (What it saw is not in the plan.)"""
    damages: tuple[Damage, ...]
    """Damaged records, found by the index pass or later: each once, the first 1,000."""
    stage_s: Mapping[str, float]
    """Seconds of wall time by stage, of all workers of this daemon together. Loading: "read", "inflate", "frames"
    (finding where each record begins), "check" (CRCs; of compressed shards, frames too), "parse" (and writing rows to
    their places), "order" (the rest of a load). Filling: "fill" (without the fields). Waiting: for a "slot" that the
    consumer gives back, or for a "window" that is being loaded. Empty in a group."""
    field_s: Mapping[str, float]
    """Seconds of these workers by field: making it of rows, or of other fields; intermediate fields are here too. If
    a batch takes less than 1 ms, one call in sixteen is timed and counts for all. Empty where ``stage_s`` is."""
    waits: tuple[int, ...]
    """A histogram of the consumer's waits at this daemon: how many were shorter than 4.1 µs, how many from there to
    twice that, and so on, each limit twice the one before; the last counts all longer ones. Empty where ``stage_s``
    is."""
    storage: StorageCounts
    """What the workers have asked of storage so far, the index pass included. In groups and over the network, it is
    the index pass alone."""
    workers: int
    """Worker processes."""
    workers_restarted: int
    """Workers that died and were replaced."""
    daemon_restarts: int
    """How often the daemon was replaced, because it died or stalled, or because Ctrl-C cut a message of its short."""
    slots: int
    """Batches for which there is shared memory."""
    slots_lent: int
    """Slots that the consumer holds now."""
    slot_bytes: int
    """Bytes of one slot."""
    window_records: int
    """Records of the largest shuffle window."""
    window_bytes: int
    """Bytes of all windows that are held at a time, packed."""
    kernels: Kernels
    """What unpacks bits: "compiled", where the extra of that name is installed and a field has bits; else "numpy"."""
    index_s: float
    """Seconds spent on the index: finding and reading it, or making it."""
    index_cached: int
    """Shards whose index came from the cache."""


@dataclass(frozen=True)
class Facts:
    """What does not change in a stream; it stands on the page, for processes that have nothing else."""

    fields: tuple[str, ...]
    """Names in the order in which workers make them, intermediate fields included."""
    derived: tuple[str, ...]
    """Those of them that a function of the user's computes."""
    workers: int
    cores: int
    """Cores that the daemon and its workers may use."""
    batch_size: int
    held_batches: int
    slots: int
    steps_per_epoch: int
    """Batches of an epoch, for this host."""
    windows: int
    """Windows that are held at a time."""
    shards: int
    compressed: int
    """Shards that are GZIP or ZLIB."""
    storage: tuple[str, ...]
    """Where shards are: kinds of file systems, such as "ext4" and "nfs4", or the schemes of URIs, such as "s3"."""
    has_bits: bool
    """Whether any field unpacks bits."""
    batch_bytes: int
    """Bytes of a whole batch as it is delivered."""
    packed_bytes: int
    """Bytes of its records as they lie in a window, packed."""


@dataclass(frozen=True)
class Snapshot:
    """What a stream had done by a certain moment. Times are wall time, except where the name says ``cpu``."""

    time_s: float
    """That moment, by the machine's monotonic clock."""
    batches: int
    records: int
    wait_s: float
    """Seconds that the consumer waited for batches."""
    waits: tuple[int, ...]
    """As in :class:`Statistics`."""
    copy_s: float
    """Seconds that the consumer spent copying batches, because it held too many."""
    takes_ahead: bool
    """Whether batches are taken ahead of their use, as by tf.data: then a wait need not delay the training."""
    stage_s: Mapping[str, float]
    field_s: Mapping[str, float]
    device_wait_s: float = 0.0
    """As in :class:`Statistics`."""
    copies_ahead: int = 0
    """Batches that are copied to a device before they are taken."""
    consumer_pid: int = 0
    """0: no consumer has begun."""
    consumer_cpu_s: float = 0.0
    """CPU time of the consumer's process."""
    thread_cpu_s: float = 0.0
    """CPU time of its main thread or of the thread that takes batches, whichever used more."""
    thread_delay_s: float = 0.0
    """Seconds in which this thread could have run, but had no core."""
    worker_cpu_s: float = 0.0
    delay_s: float = 0.0
    """Seconds in which workers could have run, but had no core."""
    idle_s: float = 0.0
    """Seconds in which cores of the machine were idle, summed over the cores."""
    throttled_s: float = 0.0
    """Seconds for which the cgroup was stopped because it had used up its quota of CPU time."""
    memory_stall_s: float = 0.0
    """Seconds in which some process waited for memory (PSI)."""
    asked_bytes: int = 0
    """Bytes that workers read."""
    fetched_bytes: int = 0
    """Those of them that came from storage, not from the page cache."""
    epoch: int = 0
    batch: int = 0
    """The number, in its epoch, of the batch that the consumer takes next."""
    slots_full: int = 0
    windows_ready: int = 0
    workers_restarted: int = 0
    number: int = 0
    """Which sample of its page it is, from 0 on."""
    damaged: int = 0
    """Records that the index pass found damaged."""
    kernels: Kernels = "numpy"
