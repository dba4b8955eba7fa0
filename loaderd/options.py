"""The options that a user can choose; each object of them checks its values when it is made."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from loaderd.errors import OptionError, arguments_of, names_its_arguments
from loaderd.machine import MAX_SENT_FILES, available_memory, usable_cores
from loaderd.redaction import shown

_P = ParamSpec("_P")
_R = TypeVar("_R")

OnCorrupt = Literal["raise", "skip_record", "skip_shard", "skip_any"]
Remainder = Literal["drop", "short", "carry"]
Refresh = Literal["never", "epoch"]
Unpack = Literal["worker", "device"]

DEFAULT_WINDOW_RECORDS = 262_144
DEFAULT_WINDOW_BYTES = 256 << 20
DEFAULT_BLOCK_RECORDS = 1024
_UNSHUFFLED_WINDOW_RECORDS = 16_384
_MAX_DEFAULT_WORKERS = 8
MAX_WORKERS = MAX_SENT_FILES - 5
"""A consumer gets the bell of each in one message, with five descriptors more (``Opened``)."""
# A worker takes 25 MiB and its share of the slots; what a schema imports comes on top.
_BYTES_PER_DEFAULT_WORKER = 128 << 20
_SLOTS_PER_WORKER = 2
MAX_STEP = (1 << 38) - 1
"""The number of the last batch that a pass can have: the page of a stream has 38 bits for it."""
_MOST = (1 << 63) - 1
MAX_EPOCHS = 1 << 30
"""So many epochs a pass may have, and passes begin in so many. A set that begins 2**32 epochs in each epoch of a Mix
numbers its own with 63 bits."""
_LEAST_TIMEOUT_S = 1e-6
HINT_GROWING_ON_HOSTS = (
    "With epochs=1, for each epoch: one host calls place = loader.next_position(), and sends place.to_json() to the "
    "others; all call loader.load_state_dict(place), and iterate."
)
_MOST_REQUESTS = 256
_LEAST_CACHE_BYTES = 1 << 20
MEMORY_HINT = (
    "Workers are other processes: they do not have what is in the memory of this one. Write the shards to files, as "
    "in /dev/shm."
)


_OTHER_NAMES = {
    name: text
    for text, names in {
        'give remainder="drop"': "drop_remainder drop_last",
        "give workers=": "num_workers worker_count num_parallel_calls num_parallel_reads",
        "give epochs=": "num_epochs repeat",
        "give seed=; workers need none": "generator worker_init_fn",
        "give shuffle=Shuffle(window_records=…)": "buffer_size shuffle_buffer_size",
        "give shuffle=, and shard=(i, n)": "sampler batch_sampler",
        "give shard=(i, n)": "num_shards num_replicas rank shard_options",
        "give shards=": "filenames file_pattern dataset data_source",
        "give schema=": "features collate_fn",
        "give schema=, with a field Derived": "transform operations",
        "give stall_timeout=": "timeout",
        "give it": "schema batch_size epochs shuffle seed remainder shard workers on_corrupt held_batches "
        "index_cache progress refresh stall_timeout report storage where sample start unpack",
        "use device= of batches of loaderd_torch, loaderd_jax or loaderd_tf": "device pin_memory pin_memory_device "
        "non_blocking",
        "leave it out: compression is recognized by content": "compression_type",
        "leave it out: the workers are ahead by themselves": "prefetch prefetch_factor worker_buffer_size "
        "read_options cycle_length block_length",
        "leave it out: workers live as long as the loader": "persistent_workers multiprocessing_context",
        "leave it out: the order is always the same for the same seed": "deterministic in_order",
        "call load_state_dict(loaderd.Position()) before each iteration": "reshuffle_each_iteration",
    }.items()
    for name in names.split()
}
"""What to do in place of giving an option of another library (see docs/migration.md), or of another function."""


def suggests_options(function: Callable[_P, _R], elsewhere: str = "where the loader is made") -> Callable[_P, _R]:
    """``names_its_arguments``, which also knows what other libraries call an option.

    ``elsewhere``: where to give those options that ``function`` does not have.
    """
    own = arguments_of(function)

    def here(text: str) -> str:
        verb, _, option = text.partition("=")[0].partition(" ")
        return f"{text} {elsewhere}" if verb == "give" and option not in own else text

    return names_its_arguments(function, {name: here(text) for name, text in _OTHER_NAMES.items()})


def require(condition: bool, what: str, must: str, got: Any, hint: str = "") -> None:
    """Raise OptionError unless ``condition``. ``hint``: what to do."""
    if not condition:
        raise OptionError(f"{what} must be {must}, got {shown(got, 300)}", hint=hint)


def require_choice(value: Any, what: str, kind: Any) -> None:
    """Raise OptionError unless ``value`` is one of the values of ``kind``, a ``Literal``."""
    *names, last = (f'"{name}"' for name in get_args(kind))
    require(isinstance(value, str) and value in get_args(kind), what, f"{', '.join(names)} or {last}", value)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer (numpy's will do), and not a bool, from ``least`` to 2**63 - 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= _MOST


def as_count(value: Any, what: str, must: str = "a positive integer", least: int = 1, most: int = _MOST) -> int:
    """``value`` as an int of Python's, which messages can carry; raises OptionError unless it is from least to most.

    ``must``: what the option may be; where a count is too large, the error says ``most`` instead.
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    require(is_integer and int(value) >= least, what, must, value)
    require(int(value) <= most, what, f"at most {most}", value)
    return int(value)


def as_seed(seed: Any) -> int:
    """``seed`` as an int. Raises OptionError."""
    require(is_count(seed, 0), "seed", "an integer from 0 to 2**63 - 1", seed)
    return int(seed)


def _drawn_seed() -> int:
    """A seed for ``seed=None``."""
    import logging  # few draw one, and the import takes 2 ms

    seed = int.from_bytes(os.urandom(4), "little")
    logging.getLogger("loaderd").info("seed=None: the seed that was drawn is %d", seed)
    return seed


def as_float(value: Any, what: str, must: str, least: float = 0.0) -> float:
    """``value`` as a finite float of at least ``least``; raises OptionError."""
    try:
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # of an integer
        seconds = math.inf
    require(math.isfinite(seconds) and seconds >= least, what, must, value)
    return seconds


def as_shard(shard: Any) -> tuple[int, int]:
    """``shard`` as (host, number of hosts). Raises OptionError."""
    is_pair = isinstance(shard, (tuple, list)) and len(shard) == 2
    is_shard = is_pair and is_count(shard[0], 0) and is_count(shard[1]) and shard[0] < shard[1]
    require(is_shard, "shard", "a pair (host, number of hosts) with 0 <= host < number of hosts", shard)
    return int(shard[0]), int(shard[1])


@dataclass(frozen=True)
class Shuffle:
    """How thoroughly to shuffle, and for how much memory.

    ``window_records``: the size of the windows in which records are permuted; two to four are held at a time, packed.
    None: 262,144, or as many as fit in 256 MiB. ``block_records``: how many consecutive records make a block; over
    the epoch, whole blocks are permuted. Smaller ones mix better and are read more slowly. Another value needs
    another index.
    """

    window_records: int | None = None
    block_records: int = DEFAULT_BLOCK_RECORDS

    def __post_init__(self) -> None:
        if self.window_records is not None:
            records = as_count(self.window_records, "Shuffle.window_records", "a positive integer or None")
            object.__setattr__(self, "window_records", records)
        object.__setattr__(self, "block_records", as_count(self.block_records, "Shuffle.block_records"))


def default_workers() -> int:
    """One less than there are cores, at most eight; but with two cores, two. Fewer where memory is short.

    This may depend on the machine, because the order of records depends on the window, but not on the workers.
    """
    cores = usable_cores()
    of_cores = cores if cores <= 2 else min(cores - 1, _MAX_DEFAULT_WORKERS)
    return max(1, min(of_cores, available_memory().free_bytes // _BYTES_PER_DEFAULT_WORKER))


@dataclass(frozen=True)
class Storage:
    """How shards are read from storage.

    ``retry_s``: for how many seconds a failed request is tried again, with growing pauses, if the failure may pass:
    no answer, a dropped connection, "slow down", too many open files, credentials that were accepted before. After
    that, StorageError is raised; nothing is skipped. ``requests``: how many a worker has under way at a time, for
    storage that a URI names; fewer while requests fail.

    ``cache_dir``: a folder on a local disk where fetched bytes are kept, which any number of processes may share;
    None: nothing is kept. ``cache_bytes``: how much it may hold; what was not used for the longest time is deleted
    first. If all of it is in use, it stays, and what it does not hold is fetched each time.

    ``filesystem``: a file system of ``pyarrow.fs`` or ``fsspec`` that opens URIs in place of the one that their
    scheme names. It is sent to other processes, so it must be picklable.
    """

    retry_s: float = 60.0
    requests: int = 32
    cache_dir: str | None = None
    cache_bytes: int = 32 << 30
    filesystem: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        must = "a number of seconds, 0 or more"
        checked: dict[str, Any] = {"retry_s": as_float(self.retry_s, "Storage.retry_s", must)}
        checked["requests"] = as_count(self.requests, "Storage.requests", most=_MOST_REQUESTS)
        cache_dir = self.cache_dir
        require(cache_dir is None or is_path(cache_dir), "Storage.cache_dir", "a folder or None", cache_dir)
        if cache_dir is not None:
            checked["cache_dir"] = as_absolute(cache_dir, "Storage.cache_dir")
        checked["cache_bytes"] = as_count(
            self.cache_bytes, "Storage.cache_bytes", "an integer of at least a MiB (2**20)", _LEAST_CACHE_BYTES
        )
        is_memory = getattr(self.filesystem, "protocol", None) == "memory"  # fsspec's
        must = "a file system that other processes can read"
        require(not is_memory, "Storage.filesystem", must, self.filesystem, MEMORY_HINT)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def pickled_storage(storage: Storage) -> bytes:
    """``storage`` for other processes; the same object gives the same bytes each time."""
    if storage.filesystem is None:
        return pickle.dumps(storage)
    import cloudpickle  # the file system's class may be one of the user's script

    pickled: bytes = cloudpickle.dumps(storage)
    return pickled


for _kind in (Shuffle, Storage):
    _kind.__init__ = names_its_arguments(_kind.__init__)  # type: ignore[method-assign]

DEFAULT_STORAGE = Storage()


@dataclass(frozen=True)
class StreamOptions:
    """Everything that a loader is asked for, beside the shards and the schema. See ``loaderd.Loader``."""

    batch_size: int
    epochs: int | None = 1
    shuffle: bool | Shuffle = True
    seed: int = 0
    remainder: Remainder = "short"
    shard: tuple[int, int] = (0, 1)
    workers: int | None = None
    on_corrupt: OnCorrupt = "raise"
    held_batches: int = 4
    index_cache: str = "user"
    stall_timeout: float | None = 120.0
    report: str | None = None
    storage: Storage = DEFAULT_STORAGE
    unpack: Unpack = "worker"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"batch_size": as_count(self.batch_size, "batch_size")}
        for name, most in (("epochs", MAX_EPOCHS), ("workers", MAX_WORKERS)):
            value, must = getattr(self, name), "a positive integer or None"
            checked[name] = None if value is None else as_count(value, name, must, most=most)
        if self.workers is None:  # chosen once: the sizes of memory depend on it
            checked["workers"] = default_workers()
        is_known = isinstance(self.shuffle, (bool, Shuffle))
        hint = f"loaderd.Shuffle(window_records={self.shuffle}) shuffles among so many."
        hint = hint if is_count(self.shuffle) else ""
        require(is_known, "shuffle", "True, False or loaderd.Shuffle", self.shuffle, hint)
        checked["seed"] = _drawn_seed() if self.seed is None else as_seed(self.seed)
        require_choice(self.remainder, "remainder", Remainder)
        checked["shard"] = as_shard(self.shard)
        require_choice(self.on_corrupt, "on_corrupt", OnCorrupt)
        require_choice(self.unpack, "unpack", Unpack)
        checked["held_batches"] = as_count(self.held_batches, "held_batches")
        checked["index_cache"] = _index_cache(self.index_cache)
        require(self.report is None or is_path(self.report), "report", "a path or None", self.report)
        checked["report"] = None if self.report is None else as_absolute(self.report, "report")
        require(isinstance(self.storage, Storage), "storage", "a loaderd.Storage", self.storage)
        if self.stall_timeout is not None:
            must = "a positive number of seconds or None"
            checked["stall_timeout"] = as_float(self.stall_timeout, "stall_timeout", must, _LEAST_TIMEOUT_S)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_growing(self) -> None:
        """Raise OptionError for what data that grow cannot have: only the epoch in use is listed."""
        if self.remainder == "carry":
            raise OptionError('remainder="carry" cannot complete a batch from an epoch that has not been listed yet')
        if self.shard[1] > 1 and self.epochs != 1:
            raise OptionError(
                f"epochs={self.epochs} with shard={self.shard} is not for data that grow: each host would list the "
                "shards of the next epoch at a moment of its own, and so share out another one",
                hint=HINT_GROWING_ON_HOSTS,
            )

    @property
    def num_workers(self) -> int:
        assert self.workers is not None
        return self.workers

    @property
    def num_slots(self) -> int:
        """Slots that the consumer may hold, and two for each worker: it fills one, and one waits to be taken."""
        return self.held_batches + _SLOTS_PER_WORKER * self.num_workers

    @property
    def num_windows(self) -> int:
        """Windows that are held at a time: two; three from 4 workers on, four from 12 on.

        While the last loads of a window are under way, the other workers need a further one. On 16 cores, 14 workers
        load 16.8 million chess records a second into two windows, 25.6 into three, and 30.5 into four.
        """
        return min(4, 2 + (self.num_workers + 4) // 8)

    @property
    def block_records(self) -> int:
        return self.shuffle.block_records if isinstance(self.shuffle, Shuffle) else DEFAULT_BLOCK_RECORDS

    def window_records(self, row_bytes: int) -> int:
        """Rows of a window: never fewer than a batch, so that a batch does not need many windows at a time."""
        if not self.shuffle:
            wanted = min(_UNSHUFFLED_WINDOW_RECORDS, DEFAULT_WINDOW_BYTES // row_bytes)
        elif isinstance(self.shuffle, Shuffle) and self.shuffle.window_records is not None:
            wanted = self.shuffle.window_records
        else:
            wanted = min(DEFAULT_WINDOW_RECORDS, DEFAULT_WINDOW_BYTES // row_bytes)
        return max(wanted, self.batch_size)


def _index_cache(value: Any) -> str:
    must = '"user", "beside", "none" or a folder'
    require(is_path(value), "index_cache", must, value)
    where: str = os.fspath(value)
    is_known = where in ("user", "beside", "none")
    if isinstance(value, os.PathLike):
        return os.path.join(os.curdir, where) if is_known else where
    if os.path.basename(where) == where and not is_known and not os.path.isdir(where):
        raise OptionError(f"index_cache must be {must}, got {value!r}", hint=f"A new folder here is ./{where}")
    return where


def is_path(value: Any) -> bool:
    """Whether ``value`` is text, or an ``os.PathLike``, that can be the path of a file."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    try:
        path = os.fsencode(value)
    except (UnicodeEncodeError, TypeError):
        return False
    return bool(path) and b"\0" not in path and isinstance(os.fspath(value), str)


def as_absolute(path: str | os.PathLike[str], what: str) -> str:
    """``path`` made absolute, ``~`` expanded. Raises OptionError where the working directory has been deleted."""
    path = os.path.expanduser(path)
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise OptionError(
            f"{what} must be an absolute path where the working directory has been deleted, got {path!r}"
        ) from None
