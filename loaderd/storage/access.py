"""Reading object stores: requests by many threads, tried again while a failure may pass, counted and cached.

::

    fetch(file, offset, size) ──► askers' threads ──► parts on the local disk (range_cache), if the user wants that
                                                  └──► GET, asked again while the failure may pass (retries)

How many requests a bucket gets at a time, and whose credentials they carry: ``retries.RateLimiter``, ``store.Store``.

**An object that was replaced** differs from the one that was listed in its size, its time or its content. The index
has a CRC of each block's content, which readers compare: that costs no request. Size and time are looked at when an
object is opened, where a CRC says no or a read fails, and behind what was read as a stream, of whose parts the index
has no CRC. (``pyarrow.fs`` does not show the ETag that each answer has.)
"""

from __future__ import annotations

import copy
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from loaderd.errors import LoaderdError
from loaderd.machine import remedy
from loaderd.options import Storage
from loaderd.snapshots import StorageCounts
from loaderd.storage.credentials import asked_of, host_of
from loaderd.storage.outage_tracker import OutageTracker
from loaderd.storage.range_cache import PART_BYTES, RangeCache
from loaderd.storage.retries import call_with_retries, is_of_credentials, may_pass
from loaderd.storage.shard_file import HINT_STORAGE, ShardFile, changed, is_remote, unanswered, unreadable
from loaderd.storage.storage_threads import RequestThreads
from loaderd.storage.store import Store, root_of

if TYPE_CHECKING:
    from concurrent.futures import Future

PIECE_BYTES = 4 * PART_BYTES

LOOK_EVERY_S = 2.0
# How many objects stay open: one that is opened again takes a request. Those of stores hold no connection.
_MOST_OBJECTS, _OBJECT_BYTES = 16_384, 3 << 10
_STORES = ("s3", "gcs", "abfs")
_MOST_OTHERS = 256  # each may hold a descriptor, or a buffer of some MiB
# For a request that is still under way when ``retry_s`` is over: pyarrow does not say how long it has taken so far.
_GRACE_S = 30.0
_NS = 10**9

# What pyarrow says of failures that are not about the object which is asked for.
_SAYS_NOTHING_OF_OBJECTS = re.compile(
    r"SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTL|NETWORK_CONNECTION|REQUEST_TIMEOUT|UNAVAILABLE|HTTP status (429|50\d)"
)
_MOST_LINES = 3  # of an error of pyarrow's: that of a missing Java has a hundred
_TOO_SMALL = (
    "Storage.cache_dir ({}) may hold {:,} bytes, and more than that is in use: the rest is fetched again in each "
    "epoch. To keep all of it, give Storage(cache_bytes=…) the size of the shards"
)
_NO_HOST = re.compile(r"Could not resolve host")
_NO_REASON = re.compile(r"ACCESS_DENIED|No response body")
_BEFORE_REASON = re.compile(r"^When listing .*?: (AWS Error .*?: Unable to parse ExceptionName: )?")
_HINT_CREDENTIALS = (
    "Renew them there: they are looked for anew when they are refused. Nothing is skipped: ask again to go on, in a "
    "loop the same iterator (next)."
)

_Answer = TypeVar("_Answer")


def no_callback() -> None:
    """A callback for when nobody wants to know."""


def objects_bytes(files: Iterable[ShardFile]) -> int:
    """Bytes that a process needs for the objects among ``files`` that it keeps open, at most."""
    return min(_MOST_OBJECTS, sum(is_remote(file.uri) for file in files)) * _OBJECT_BYTES


class _Object:
    """An object of storage that was opened: as it was then, it was the one that was listed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: Any = None
        self.opened_by: Any = None
        self.opened_s = -math.inf


class Access:
    """See the module's docstring.

    ``on_wait`` is called now and then while a thread waits, in that thread. ``on_arrival`` is called, in any thread,
    when something that was fetched ahead has come. ``say`` tells the user something, in any thread.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        on_wait: Callable[[], None] = no_callback,
        on_arrival: Callable[[], None] = no_callback,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.storage = storage or Storage()
        self.on_wait, self.on_arrival, self._say = on_wait, on_arrival, say
        self.outages = OutageTracker()
        self._stores: dict[str, Store] = {}
        folder = self.storage.cache_dir
        self._cache = None if folder is None else RangeCache(folder, self.storage.cache_bytes)
        self._askers = RequestThreads(self.storage.requests)
        self._objects: OrderedDict[ShardFile, _Object] = OrderedDict()
        self._ahead: dict[Hashable, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._were_accepted = self._said_full = False
        self._counts = dict.fromkeys((each.name for each in fields(StorageCounts)), 0)

    def counted_apart(self) -> Access:
        """The same threads, connections and objects for a stream, with counts and outages of its own.

        Storage has accepted somebody's credentials before, as the shards were listed: so if it refuses those of this
        process, others may come in time, even if it has accepted none of this process yet.
        """
        apart = copy.copy(self)
        apart.outages = OutageTracker()
        apart._were_accepted = True
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

    def _store(self, uri: str) -> Store:
        root = root_of(uri, self.storage)
        with self._lock:
            if root not in self._stores:
                self._stores[root] = Store(self.storage, root)
            return self._stores[root]

    def locate(self, uri: str) -> tuple[Any, str]:
        """(file system, path there) of a URI. Raises ShardReadError for one that cannot be parsed, and OSError."""
        return self._store(uri).locate(uri)

    def call_with_retries(self, uri: str, question: Callable[[], _Answer], where: str = "") -> _Answer:
        """The answer to ``question``, which is called in this thread, again while a failure may pass.

        ``where`` in what ``uri`` names, for errors.

        Raises ShardReadError where there is no ``uri``, and StorageError.
        """
        store, used = self._store(uri), list[Any]()

        def ask() -> _Answer:
            used.append(store.locate(uri)[0])
            answer = question()
            store.accepted(used[-1])
            return answer

        def watched() -> _Answer:
            try:
                return self.outages.watch(uri, ask)
            except Exception as error:
                if not store.has_answered and not self._were_accepted and _has_no_host(uri, error):
                    said = f"there is no host {host_of(uri)}"
                    raise unanswered(f"{uri}{where}", said, 0, False, _hint(uri)) from None
                raise

        def renew(error: Exception) -> bool:
            if not is_of_credentials(error) or not used:
                return False
            return store.renew(used[-1], used[0] is not used[-1], self._were_accepted)

        began_s = time.monotonic()
        self.outages.begin()
        try:
            count = partial(self._count, "retries")
            return call_with_retries(watched, self.storage.retry_s, count, store.pace, renew)
        except LoaderdError:
            raise
        except FileNotFoundError as error:
            raise unreadable(uri, f"it is not there: {error}") from None
        except Exception as error:
            tried_s, hint = time.monotonic() - began_s, HINT_STORAGE
            text = str(error).partition(" error_info=")[0] or type(error).__name__  # Google's says the same again
            text = "\n".join(text.splitlines()[:_MOST_LINES])
            if is_of_credentials(error):
                hint = _HINT_CREDENTIALS
                text = f"the storage refuses the credentials, or there are none: {self._why_refused(uri) or text}"
            raise unanswered(f"{uri}{where}", text, tried_s, may_pass(error), _hint(uri, hint)) from None

    def _why_refused(self, uri: str) -> str:
        """What the answer to a listing says: S3 gives a reason in the body, and an answer to a look has none."""
        from pyarrow import fs

        try:
            filesystem, path = self.locate(uri)
            if filesystem.type_name == "s3":
                filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        except Exception as error:
            if not _NO_REASON.search(str(error)):
                return _BEFORE_REASON.sub("", str(error)).replace(" Message:", ":")
        return ""

    def wait(self, uri: str, answer: Future[_Answer], on_wait: Callable[[], None] | None = None) -> _Answer:
        """The answer to what was asked of ``uri``. Raises its error, or StorageError after ``limit_s``.

        ``on_wait`` in place of that of all waits.
        """
        try:
            return self._askers.wait(answer, on_wait or self.on_wait, self.limit_s)
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
        """Give up the threads that wait for storage; new threads take what is asked from now on.

        They need no lock that one of those holds, and no turn that it has taken.
        """
        with self._lock:
            self._objects.clear()
            self._stores.clear()
        self._askers.abandon()

    # ------------------------------------------------------------------------------------------ objects

    def fetch(self, file: ShardFile, offset: int, size: int) -> Future[bytes]:
        """``size`` bytes of a shard from ``offset`` on; the shard must have them all."""
        fetch = partial(self._fetch, file, offset, size)
        return self.ask(lambda: self.call_with_retries(file.uri, fetch, f" at byte {offset}"))

    def fetch_ahead(self, file: ShardFile) -> None:
        """Have the first piece of a shard fetched for :meth:`first_piece`."""
        if file.size_bytes and file not in self._ahead:
            self._ahead[file] = self.fetch(file, 0, min(file.size_bytes, PIECE_BYTES))

    def first_piece(self, file: ShardFile) -> Future[bytes] | None:
        """What :meth:`fetch_ahead` has asked for, given out once; None if there is nothing."""
        return self._ahead.pop(file, None)

    def look_at(self, file: ShardFile, every_s: float = 0.0) -> None:
        """Raise ShardReadError if the object is not the one that was listed; it is looked at every ``every_s``."""
        since_s = time.monotonic() - every_s
        self.wait(file.uri, self.ask(lambda: self.call_with_retries(file.uri, lambda: self._open(file, since_s))))

    def _fetch(self, file: ShardFile, offset: int, size: int) -> bytes:
        cache = self._cache
        if cache is None or not file.has_version:
            return self._read(file, offset, size)
        first, stop = offset // PART_BYTES, -(-(offset + size) // PART_BYTES)
        parts = {number * PART_BYTES: cache.load(file, number) for number in range(first, stop)}
        missing = [begin for begin, part in parts.items() if part is None]
        self._count("cache_hits", len(parts) - len(missing))
        self._count("cache_misses", len(missing))
        if missing:
            begin, stop = missing[0], min(missing[-1] + PART_BYTES, file.size_bytes)
            if is_full := cache.is_full:  # nothing is kept: no more is fetched than is wanted
                begin, stop = max(begin, offset), min(stop, offset + size)
                self._say_full()
            parts[begin] = fetched = self._read(file, begin, stop - begin)
            for place in () if is_full else missing:
                cache.store(file, place // PART_BYTES, fetched[place - begin :][:PART_BYTES])
        data = memoryview(bytearray(size))
        for begin, part in parts.items():
            if part is not None:
                _copy(part, begin, data, offset)
        return bytes(data)

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            self._say(_TOO_SMALL.format(self.storage.cache_dir, self.storage.cache_bytes))

    def _read(self, file: ShardFile, offset: int, size: int) -> bytes:
        handle = self._open(file)
        try:
            data: bytes = handle.read_at(size, offset)
        except Exception as error:
            if not _SAYS_NOTHING_OF_OBJECTS.search(str(error)):
                self._forget(file)  # a shorter object may be in its place: the next read looks, and says so
            raise
        self._count("requests")
        self._count("bytes", len(data))
        if len(data) < size:
            self._forget(file)
            raise OSError(f"{len(data)} of {size} bytes came")
        return data

    def _forget(self, file: ShardFile) -> None:
        with self._lock:
            self._objects.pop(file, None)

    def _open(self, file: ShardFile, since_s: float = -math.inf) -> Any:
        """A handle of the object, which was looked at since ``since_s``."""
        filesystem, path = self.locate(file.uri)
        most = _MOST_OBJECTS if filesystem.type_name in _STORES else _MOST_OTHERS
        with self._lock:
            one = self._objects.setdefault(file, _Object())
            self._objects.move_to_end(file)
            while len(self._objects) > most:
                self._objects.popitem(last=False)
        with one.lock:
            if one.opened_s >= since_s and one.opened_by is filesystem:
                return one.handle
            began_s = time.monotonic()
            handle = filesystem.open_input_file(path)
            self._count("requests")
            size, mtime_ns = handle.size(), _mtime_ns(handle)
            if not mtime_ns and file.mtime_ns:
                mtime_ns = filesystem.get_file_info(path).mtime_ns or 0
                self._count("requests")
            # Whole seconds: some stores give the time more exactly in lists than elsewhere.
            is_older = bool(mtime_ns and file.mtime_ns) and mtime_ns // _NS != file.mtime_ns // _NS
            if size != file.size_bytes or is_older:
                raise changed(file, size, mtime_ns)
            one.handle, one.opened_by, one.opened_s = handle, filesystem, began_s
            return handle


def _copy(part: bytes, begin: int, into: memoryview, begin_into: int) -> None:
    """Copy what two stretches of a file have in common: ``part``, which begins at ``begin``, and ``into``."""
    first, stop = max(begin, begin_into), min(begin + len(part), begin_into + len(into))
    into[first - begin_into : stop - begin_into] = memoryview(part)[first - begin : stop - begin]


def _hint(uri: str, hint: str = HINT_STORAGE) -> str:
    asked = asked_of(uri)
    return f"Asked was {asked}. {hint}" if asked else hint


def _has_no_host(uri: str, error: Exception) -> bool:
    """Whether an error says that nobody knows the host of a URI: not that nobody could be asked."""
    import socket

    if is_of_credentials(error) or not _NO_HOST.search(str(error)):
        return False
    try:
        socket.getaddrinfo(host_of(uri).partition(":")[0], None)
    except socket.gaierror as unknown:
        return unknown.errno == socket.EAI_NONAME
    except OSError:
        pass
    return False


def _mtime_ns(handle: Any) -> int:
    """The time of change in ns of an object that was opened, by what the store says of it; or 0."""
    from email.utils import parsedate_to_datetime  # imports much, and only object stores need it

    try:
        metadata = {str(key).lower(): value for key, value in (handle.metadata() or {}).items()}
        text = bytes(metadata.get("last-modified", b"")).decode(errors="replace")
        is_http = " " in text  # "Sat, 01 Jan 2022 00:00:00 GMT"; else it is one of ISO 8601
        when = parsedate_to_datetime(text) if is_http else datetime.fromisoformat(text.replace("Z", "+00:00"))
        return int(when.timestamp()) * _NS
    except (AttributeError, NotImplementedError, ValueError, TypeError, IndexError):
        return 0
