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
    """Bytes that came."""
    retries: int = 0
    """Requests that had failed and were made again."""
    cache_hits: int = 0
    """Parts of shards (of 256 KiB) that were read from ``Storage.cache_dir``."""
    cache_misses: int = 0
    """Parts that had to be fetched, though there is a ``Storage.cache_dir``."""


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
    """Batches of these that were copied, because the consumer holds so many that the slots would run out."""
    starts: int
    """How often the workers had to begin at a place other than the next: once a pass, and once a jump."""
    wait_s: float
    """Seconds that the consumer waited for a batch."""
    device_wait_s: float
    """Seconds that it waited, besides, for copies of batches to a device. Where a ``tf.data.Dataset`` copies, it is
    the time that they take, as a copy took that was tried when the data set was made."""
    records_skipped: int
    """Deliveries left out because of damage that the index pass had not seen. (What it saw is not in the plan.)"""
    damages: tuple[Damage, ...]
    """What the index pass found, and what came up later: each record once, the first 1,000 of all."""
    stage_s: Mapping[str, float]
    """Seconds of wall time that all workers of this daemon have spent so far. With records: "read", "inflate",
    "frames" (find where each begins), "check" (CRCs; of compressed shards also frames), "parse" (and write the rows
    to their places), "order" (the rest of a load). With batches: "fill" (but for the fields). Waiting: for a "slot"
    that the consumer gives back, or for a "window" that is being loaded. Empty in a group."""
    field_s: Mapping[str, float]
    """Seconds of these workers by field: what it takes to make it of rows, or of other fields. Fields of which other
    ones are derived are here, too. Where a batch takes less than 1 ms, one call in sixteen is timed for all of them.
    Empty as ``stage_s`` is."""
    waits: tuple[int, ...]
    """How many waits of the consumer were shorter than 4.1 µs, how many of the others shorter than twice that, and so
    on; the last number is of all longer ones. Of this daemon; empty as ``stage_s`` is."""
    storage: StorageCounts
    """What the workers have asked of storage so far, the index pass included. In groups and over the network, it is
    the index pass alone."""
    workers: int
    """Worker processes."""
    workers_restarted: int
    """Workers that died and were replaced."""
    daemon_restarts: int
    """How often the daemon was replaced: it died or stalled, or Ctrl-C came in the middle of what it said."""
    slots: int
    """Batches that fit in shared memory at a time."""
    slots_lent: int
    """Slots that the consumer holds now."""
    slot_bytes: int
    """Bytes of one slot."""
    window_records: int
    """Records of the largest shuffle window."""
    window_bytes: int
    """Bytes of all windows that are held at a time, packed."""
    kernels: Kernels
    """What unpacks bits: "compiled" code, where the extra of that name is installed and a field is for it."""
    index_s: float
    """Seconds that it took to find and read, or to make, the index."""
    index_cached: int
    """Shards whose index came from the cache."""


@dataclass(frozen=True)
class Facts:
    """What a stream is made with. From a page, for whoever reads what it says."""

    fields: tuple[str, ...]
    """In the order in which they are made, those included that others are derived from."""
    derived: tuple[str, ...]
    """Those of them that a function of the user's makes."""
    workers: int
    cores: int
    """That the daemon and its workers may keep busy."""
    batch_size: int
    held_batches: int
    slots: int
    steps_per_epoch: int
    """Batches of an epoch, for this host."""
    windows: int
    """That are held at a time."""
    shards: int
    compressed: int
    """Shards that are GZIP or ZLIB."""
    storage: tuple[str, ...]
    """Where shards are: kinds of file systems, such as "ext4" and "nfs4", or the schemes of URIs, such as "s3"."""
    has_bits: bool
    """Whether any field unpacks bits."""
    batch_bytes: int
    """Of a whole batch as it is delivered."""
    packed_bytes: int
    """Of its records as they are stored in a window."""


@dataclass(frozen=True)
class Snapshot:
    """What a stream had done by a moment. Times are of the wall clock, but for those with ``cpu`` in their name."""

    time_s: float
    """Of the machine's monotonic clock."""
    batches: int
    records: int
    wait_s: float
    """That the consumer has waited."""
    waits: tuple[int, ...]
    """As in :class:`Statistics`."""
    copy_s: float
    """That the consumer has copied batches, because it holds too many."""
    takes_ahead: bool
    """Whether who takes the batches is not who uses them: then a wait of the former need not be one of the latter."""
    stage_s: Mapping[str, float]
    field_s: Mapping[str, float]
    device_wait_s: float = 0.0
    """As in :class:`Statistics`."""
    copies_ahead: int = 0
    """Batches that are copied to a device before they are taken."""
    consumer_pid: int = 0
    """0: nobody has begun."""
    consumer_cpu_s: float = 0.0
    """Of the consumer's process."""
    thread_cpu_s: float = 0.0
    """Of the busiest of its main thread and of the one that takes batches."""
    thread_delay_s: float = 0.0
    """That this thread could have run, and had no core."""
    worker_cpu_s: float = 0.0
    delay_s: float = 0.0
    """That workers could have run, and had no core."""
    idle_s: float = 0.0
    """That cores of the machine had nothing to do, all cores together."""
    throttled_s: float = 0.0
    """That the cgroup was stopped, because it had used its quota of time."""
    memory_stall_s: float = 0.0
    """That something waited for memory (PSI)."""
    asked_bytes: int = 0
    """That workers have read."""
    fetched_bytes: int = 0
    """Of these, bytes that came from storage, and not from the page cache."""
    epoch: int = 0
    batch: int = 0
    """The batch of the epoch that the consumer takes next."""
    slots_full: int = 0
    windows_ready: int = 0
    workers_restarted: int = 0
    number: int = 0
    """Which sample of its page it is, from 0 on."""
    damaged: int = 0
    """Records that the index pass found damaged."""
    kernels: Kernels = "numpy"
