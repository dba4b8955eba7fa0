"""What a loader says of itself."""

from __future__ import annotations

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
    records_skipped: int
    """Deliveries left out because of damage that the index pass had not seen. (What it saw is not in the plan.)"""
    damages: tuple[Damage, ...]
    """What the index pass found, and what came up later: each record once, the first 1,000 of all."""
    worker_s: dict[str, float]
    """Seconds that all workers of this daemon have spent so far: "load" (read, check and parse records), "fill"
    (unpack them into batches), "slot" (wait for the consumer to give slots back) and "window" (wait for rows, which
    are being loaded). Empty where batches come by messages: in groups, and over the network."""
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
