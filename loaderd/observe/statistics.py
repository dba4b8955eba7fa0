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
    """Records of one epoch of all hosts, damaged ones left out (with ``on_corrupt="skip_shard"``, damaged shards)."""
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
    """Seconds that it waited, besides, for copies of batches to a device. Those of a ``tf.data.Dataset`` do not
    count."""
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
    """Seconds that these workers took to make each field of rows or of other fields, intermediate fields included.
    If a batch takes less than 1 ms, one call in sixteen is timed and counts for all. Empty where ``stage_s`` is."""
    waits: tuple[int, ...]
    """A histogram of the consumer's waits at this daemon: how many were shorter than 4.1 µs, how many from there to
    twice that, and so on, each limit twice the one before; the last counts all longer ones. Empty where ``stage_s``
    is."""
    storage: StorageCounts
    """What the workers of this daemon have asked of storage, the index pass included. In groups and over the network,
    it is the index pass alone."""
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
    """What unpacks bits: "compiled", where the extra of that name is installed and a field has bits; else "numpy".

    Where the extra is installed, frames are found, records parsed and places computed by compiled code as well.
    """
    index_s: float
    """Seconds spent on the index: finding and reading it, or making it."""
    index_cached: int
    """Shards whose index came from the cache."""
