"""What a process can read of a stream from its page: facts that never change, and what was done by some moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kernels = Literal["numpy", "compiled"]


@dataclass(frozen=True)
class StorageCounts:
    """Counts of the requests that workers made to storage named by URIs. Files on this machine's own paths are not
    counted."""

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


class Outage(NamedTuple):
    """Storage, or servers, that do not answer."""

    for_s: float
    """For how many seconds there has been no answer."""
    failures: int
    """Requests that failed since then; each is made again."""
    error: str
    """How the last of them failed; "": none has, they are only not answered."""

    def in_words(self, source: str = "the storage") -> str:
        """The outage in words; ``source``: as ``Facts`` has it."""
        last = f"; {self.failures} requests failed, the last one: {self.error}" if self.failures else ""
        return f"no answer from {source} for {self.for_s:.0f} s{last}"


class Facts(NamedTuple):
    """What does not change in a stream; it stands on the page for processes that know nothing else of the stream."""

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
    of_server: bool = False
    """Whether the workers are a server's: they work for its other consumers, too."""

    @property
    def source(self) -> str:
        """What workers get records from, in words."""
        return "the servers" if "servers" in self.storage else "the storage"


class Snapshot(NamedTuple):
    """What a stream had done by a certain moment. Times are wall time, except where the name says ``cpu``."""

    time_s: float
    """That moment, by the machine's monotonic clock."""
    batches: int
    records: int
    wait_s: float
    """Seconds that the consumer waited for batches."""
    waits: tuple[int, ...]
    """As in ``Statistics``."""
    copy_s: float
    """Seconds that the consumer spent copying batches, because it held too many."""
    takes_ahead: bool
    """Whether batches are taken ahead of their use, as by tf.data: then a wait need not delay the training."""
    stage_s: Mapping[str, float]
    field_s: Mapping[str, float]
    device_wait_s: float = 0.0
    """As in ``Statistics``."""
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
    uses_accelerator: bool = False
    """Whether the consumer's process has a GPU or a TPU open: who waits for a GPU keeps a core busy."""
    worker_cpu_s: float = 0.0
    delay_s: float = 0.0
    """Seconds in which workers could have run, but had no core."""
    stopped_s: float = 0.0
    """Seconds for which workers were stopped by a signal, summed over them."""
    cores: int = 0
    """Cores that the workers may run on now; 0: unknown."""
    nice: int = 0
    """The workers' nice value: above 0, others get more of a core than they."""
    idle_s: float = 0.0
    """Seconds in which these cores were idle, summed over the cores."""
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
    """Damages that the index pass found: no more than 1,000, or with ``report`` 200,000, are counted."""
    kernels: Kernels = "numpy"
    outage: Outage | None = None
    """None: storage, or servers, answer."""


class Progress(NamedTuple):
    """How far a pass over shards is. ``doing``: such as "indexing shards". A total of 0 is not known.

    ``remark``: what else there is to say in a line, as a sentence without its full stop.
    """

    doing: str
    done_shards: int = 0
    num_shards: int = 0
    done_bytes: int = 0
    num_bytes: int = 0
    remark: str = ""

    def in_words(self, for_s: float) -> str:
        """A line; the pass has taken ``for_s`` seconds."""
        text = f"{self.doing} for {for_s:.0f} s"
        if self.num_shards:
            text += f": {self.done_shards:,} of {self.num_shards:,} shards"
        elif self.done_shards:
            text += f": {self.done_shards:,} so far"
        if self.num_bytes:
            text += ", " if self.num_shards else ": "
            text += f"{self.done_bytes / 1e9:.2f} of {self.num_bytes / 1e9:.2f} GB"
            if 0 < self.done_bytes <= self.num_bytes:
                left_s = for_s * (self.num_bytes - self.done_bytes) / self.done_bytes
                text += f", about {span(left_s)} left"
        return f"{text}. {self.remark}" if self.remark else text


def span(seconds: float | None) -> str:
    """A duration in words, such as "3 s", "5 min", "2.5 h"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
