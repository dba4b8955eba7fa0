"""What a loader says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loaderd.errors import Damage
from loaderd.snapshots import Kernels, StorageCounts


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
