"""Reading object stores: requests by many threads, tried again while a failure may pass, counted and cached.

::

    fetch(file, offset, size) ──► askers' threads ──► parts on the local disk (range_cache), if the user wants that
                                                  └──► GET, asked again while the failure may pass (retries)

**An object that was replaced** differs from the one that was listed in its size, its time or its ETag. Looking at
these costs a request. So they are looked at before the first read of an object, and later after each read, if the
last look was two seconds ago or more. What was read from a replaced object is then refused, unless it was read within
two seconds of a look. Parts that come from the local disk are always those of the object that was listed.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from loaderd.errors import LoaderdError
from loaderd.machine import remedy
from loaderd.options import Storage
from loaderd.shards.filesystems import Filesystems
from loaderd.shards.outage_tracker import OutageTracker
from loaderd.shards.range_cache import PART_BYTES, RangeCache
from loaderd.shards.retries import insist, may_pass
from loaderd.shards.shard_file import ShardFile, changed, state_in_words, unanswered, unreadable
from loaderd.shards.storage_threads import Askers, wait_for
from loaderd.snapshots import StorageCounts

if TYPE_CHECKING:
    from concurrent.futures import Future

PIECE_BYTES = 4 * PART_BYTES

_LOOK_EVERY_S = 2.0
_MOST_OBJECTS = 4096
# For a request that is still under way when ``retry_s`` is over: pyarrow does not say how long it has taken so far.
_GRACE_S = 30.0
_NS = 10**9

_TOO_SMALL = (
    "Storage.cache_dir ({}) may hold {:,} bytes, and more than that is in use: the rest is fetched again in each "
    "epoch. To keep all of it, give Storage(cache_bytes=…) the size of the shards"
)

_Answer = TypeVar("_Answer")


def tell_nobody() -> None:
    """A callback for when nobody wants to know."""


class _Object:
    """An object of storage: what it was at the last look."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: Any = None
        self.looked_s = -1.0
        self.etag: bytes | None = None


class Access:
    """See the module's docstring.

    ``on_wait`` is called now and then while a thread waits, in that thread. ``on_arrival`` is called, in any thread,
    when something that was fetched ahead has come. ``say`` tells the user something, in any thread.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        on_wait: Callable[[], None] = tell_nobody,
        on_arrival: Callable[[], None] = tell_nobody,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.storage = storage or Storage()
        self.on_wait, self.on_arrival, self._say = on_wait, on_arrival, say
        self.outages = OutageTracker()
        self.filesystems = Filesystems(self.storage)
        folder = self.storage.cache_dir
        self._cache = None if folder is None else RangeCache(folder, self.storage.cache_bytes)
        self._askers = Askers(self.storage.requests)
        self._objects: OrderedDict[ShardFile, _Object] = OrderedDict()
        self._ahead: dict[Hashable, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._said_full = False
        self._counts = dict.fromkeys((each.name for each in fields(StorageCounts)), 0)

    def counted_apart(self) -> Access:
        """The same threads, connections and objects, with counts of their own that begin at 0, and own outages."""
        apart = copy.copy(self)
        apart.outages = OutageTracker()
        apart.take_counts()  # gives it a dict of its own
        return apart

    def take_counts(self) -> StorageCounts:
        """What was counted since the last call of this."""
        with self._lock:
            counts = StorageCounts(**self._counts)
            self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def _count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[what] += amount

    # ------------------------------------------------------------------------------------------- asking

    def ask(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        """Have ``question`` called in one of the threads, once."""
        return self._askers.ask(question)

    def insist(self, uri: str, question: Callable[[], _Answer]) -> _Answer:
        """The answer to ``question``, which is called in this thread, again while a failure may pass.

        Raises ShardReadError where there is no ``uri``, and StorageError.
        """
        began_s = time.monotonic()
        self.outages.begin()
        try:
            watched = partial(self.outages.watch, uri, question)
            return insist(watched, self.storage.retry_s, partial(self._count, "retries"))
        except LoaderdError:
            raise
        except FileNotFoundError as error:
            raise unreadable(uri, f"it is not there: {error}") from None
        except Exception as error:
            said = str(error).partition(" error_info=")[0] or type(error).__name__  # Google's says the same again
            raise unanswered(uri, said, time.monotonic() - began_s, may_pass(error)) from None

    def wait(self, uri: str, answer: Future[_Answer]) -> _Answer:
        """The answer to what was asked of ``uri``. Raises its error, or StorageError after ``limit_s``."""
        try:
            return wait_for(answer, self.on_wait, self.limit_s)
        except LoaderdError:
            raise
        except TimeoutError:
            self.abandon()
            raise unanswered(uri, "the storage does not answer", self.limit_s, True) from None
        except OSError as error:  # it could not be asked: there are no threads
            raise unanswered(uri, f"the storage cannot be asked: {error.strerror}", 0, True, remedy(error)) from None

    @property
    def limit_s(self) -> float:
        """For how long an answer is waited for, all retries together."""
        return self.storage.retry_s + _GRACE_S

    def abandon(self) -> None:
        """Give up the threads that wait for storage; new threads take what is asked from now on."""
        self._askers.abandon()

    # ------------------------------------------------------------------------------------------ objects

    def fetch(self, file: ShardFile, offset: int, size: int) -> Future[bytes]:
        """``size`` bytes of a shard from ``offset`` on; the shard must have them all."""
        return self.ask(lambda: self.insist(f"{file.uri} at byte {offset}", lambda: self._fetch(file, offset, size)))

    def fetch_ahead(self, file: ShardFile) -> None:
        """Have the first piece of a shard fetched for :meth:`first_piece`."""
        if file.size_bytes and file not in self._ahead:
            self._ahead[file] = self.fetch(file, 0, min(file.size_bytes, PIECE_BYTES))

    def first_piece(self, file: ShardFile) -> Future[bytes] | None:
        """What :meth:`fetch_ahead` has asked for, given out once; None if there is nothing."""
        return self._ahead.pop(file, None)

    def look_at(self, file: ShardFile) -> None:
        """Raise ShardReadError if the object is not the one that was listed; it is looked at every 2 s at most."""
        since_s = time.monotonic() - _LOOK_EVERY_S
        self.wait(file.uri, self.ask(lambda: self.insist(file.uri, lambda: self._look(file, since_s))))

    def _fetch(self, file: ShardFile, offset: int, size: int) -> bytes:
        cache = self._cache
        etag = None if cache is None else self._kept_under(file)
        if cache is None or etag is None:
            return self._read(file, offset, size)
        first, stop = offset // PART_BYTES, -(-(offset + size) // PART_BYTES)
        parts = {number: cache.load(file, number, etag) for number in range(first, stop)}
        missing = [number for number, part in parts.items() if part is None]
        self._count("cache_hits", len(parts) - len(missing))
        self._count("cache_misses", len(missing))
        data = memoryview(bytearray(size))
        for number, part in parts.items():
            if part is not None:
                _copy(part, number * PART_BYTES, data, offset)
        is_full = cache.is_full
        if is_full and missing and not self._said_full:
            self._said_full = True
            self._say(_TOO_SMALL.format(self.storage.cache_dir, self.storage.cache_bytes))
        for _, run in groupby(enumerate(missing), lambda placed: placed[1] - placed[0]):
            numbers = [number for _, number in run]
            begin, stop = numbers[0] * PART_BYTES, min((numbers[-1] + 1) * PART_BYTES, file.size_bytes)
            if is_full:
                begin, stop = max(begin, offset), min(stop, offset + size)
            fetched = self._read(file, begin, stop - begin)
            _copy(fetched, begin, data, offset)
            for number in () if is_full else numbers:
                cache.store(file, number, fetched[number * PART_BYTES - begin :][:PART_BYTES], etag)
        return bytes(data)

    def _kept_under(self, file: ShardFile) -> bytes | None:
        """What names an object's parts beside its URI, size and time: its ETag if it has no time, else b"".

        None: nothing tells the object from another one in its place, so no part of it is kept.
        """
        if file.has_version:
            return b""
        self._look(file, -1.0)
        return self._object(file).etag or None

    def _read(self, file: ShardFile, offset: int, size: int) -> bytes:
        one = self._object(file)
        handle = self._look(file, -1.0)
        began_s = time.monotonic()
        try:
            data: bytes = handle.read_at(size, offset)
        except Exception:
            one.looked_s = -1.0  # a shorter object may be in its place: the next read looks, and says so
            raise
        self._count("requests")
        self._count("bytes", len(data))
        if len(data) < size:
            one.looked_s = -1.0
            raise OSError(f"{len(data)} of {size} bytes came")
        if began_s - one.looked_s >= _LOOK_EVERY_S:
            self._look(file, began_s)
        return data

    def _object(self, file: ShardFile) -> _Object:
        with self._lock:
            one = self._objects.setdefault(file, _Object())
            self._objects.move_to_end(file)
            while len(self._objects) > _MOST_OBJECTS:
                self._objects.popitem(last=False)
        return one

    def _look(self, file: ShardFile, since_s: float) -> Any:
        """A handle of the object, which is looked at first unless it was since ``since_s`` (below 0: at any time)."""
        one = self._object(file)
        with one.lock:
            if one.looked_s >= max(since_s, 0.0):
                return one.handle
            filesystem, path = self.filesystems.of(file.uri)
            began_s = time.monotonic()
            handle = filesystem.open_input_file(path)
            self._count("requests")
            size, (mtime_ns, etag) = handle.size(), _version(handle)
            if not mtime_ns and file.mtime_ns:
                mtime_ns = filesystem.get_file_info(path).mtime_ns or 0
                self._count("requests")
            if size != file.size_bytes:
                raise changed(file.uri, f"{file.size_bytes} bytes", f"{size} bytes")
            # Whole seconds: some stores give the time more exactly in lists than elsewhere.
            if mtime_ns and file.mtime_ns and mtime_ns // _NS != file.mtime_ns // _NS:
                expected, found = (
                    state_in_words(size, time_ns // _NS * _NS) for time_ns in (file.mtime_ns, mtime_ns)
                )
                raise changed(file.uri, expected, found)
            if one.etag is not None and etag != one.etag:
                raise changed(file.uri, f"ETag {one.etag!r:.60}", f"ETag {etag!r:.60}")
            one.handle, one.looked_s, one.etag = handle, began_s, etag
            return handle


def _copy(part: bytes, begin: int, into: memoryview, begin_into: int) -> None:
    """Copy what two stretches of a file have in common: ``part``, which begins at ``begin``, and ``into``."""
    first, stop = max(begin, begin_into), min(begin + len(part), begin_into + len(into))
    into[first - begin_into : stop - begin_into] = memoryview(part)[first - begin : stop - begin]


def _version(handle: Any) -> tuple[int, bytes | None]:
    """(time of change in ns, or 0; ETag, or None) of an object that was opened, by what the store says of it."""
    from email.utils import parsedate_to_datetime  # imports much, and only object stores need it

    said = {str(key).lower(): value for key, value in (_metadata(handle) or {}).items()}
    text = bytes(said.get("last-modified", b"")).decode(errors="replace")
    try:
        is_http = " " in text  # "Sat, 01 Jan 2022 00:00:00 GMT"; else it is one of ISO 8601
        when = parsedate_to_datetime(text) if is_http else datetime.fromisoformat(text.replace("Z", "+00:00"))
        return int(when.timestamp()) * _NS, said.get("etag")
    except (ValueError, TypeError, IndexError):
        return 0, said.get("etag")


def _metadata(handle: Any) -> Any:
    try:
        return handle.metadata()
    except (AttributeError, NotImplementedError):
        return None
