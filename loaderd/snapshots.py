"""What is known of a stream at a moment, and what of it never changes: what its page says, to whoever reads that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Facts(NamedTuple):
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


class Snapshot(NamedTuple):
    """What a stream had done by a moment. Times are of the wall clock, but for those with ``cpu`` in their name."""

    time_s: float
    """Of the machine's monotonic clock."""
    batches: int
    records: int
    wait_s: float
    """That the consumer has waited."""
    waits: tuple[int, ...]
    """As in ``Statistics``."""
    copy_s: float
    """That the consumer has copied batches, because it holds too many."""
    takes_ahead: bool
    """Whether who takes the batches is not who uses them: then a wait of the former need not be one of the latter."""
    stage_s: Mapping[str, float]
    field_s: Mapping[str, float]
    device_wait_s: float = 0.0
    """As in ``Statistics``."""
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
