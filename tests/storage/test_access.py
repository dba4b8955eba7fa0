"""Reading object stores: storage that hangs or refuses, a cache that is too small, and what is no storage."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from loaderd.errors import OptionError, ShardReadError, StorageError
from loaderd.options import Storage
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.storage.range_cache import PART_BYTES
from loaderd.storage.shard_file import ShardFile

LONG_S = 60.0


def listed(path: Path, access: Access) -> ShardFile:
    (file,) = list_shards(f"local://{path}", access=access)
    return file


# ---------------------------------------------------------------------------------------- a cache that is too small


def test_beside_a_cache_that_is_too_small_no_more_is_fetched_than_is_read(tmp_path: Path):
    num_parts, size = 64, 60_000
    data = bytes(range(256)) * (num_parts * PART_BYTES // 256)
    (tmp_path / "a").write_bytes(data)
    said: list[str] = []
    cache_bytes = 16 * PART_BYTES
    storage = Storage(filesystem=fs.LocalFileSystem(), cache_dir=str(tmp_path / "cache"), cache_bytes=cache_bytes)
    access = Access(storage, say=said.append)
    file = listed(tmp_path / "a", access)
    offsets = [number * PART_BYTES + PART_BYTES // 2 for number in range(num_parts)]
    offsets += [number * PART_BYTES - size // 2 for number in range(1, num_parts)]  # in two parts each
    for _ in range(2):
        access.take_counts()
        for offset in offsets:
            assert access.fetch(file, offset, size).result(LONG_S) == data[offset : offset + size]
    counts = access.take_counts()
    assert counts.cache_hits > 16 and counts.bytes < len(offsets) * size
    (text,) = said
    assert "may hold 4,194,304 bytes" in text and "cache_bytes" in text


def test_few_objects_of_a_file_system_of_the_user_stay_open(tmp_path: Path):
    for number in range(400):
        (tmp_path / f"{number}").write_bytes(b"data")
    access = Access(Storage(filesystem=fs.LocalFileSystem()))
    files = list_shards(f"local://{tmp_path}/*", access=access)
    before = len(os.listdir("/proc/self/fd"))
    for file in files:
        assert access.fetch(file, 0, 4).result(LONG_S) == b"data"
    assert len(files) == 400 and len(os.listdir("/proc/self/fd")) - before < 300


# ------------------------------------------------------------------------------------ threads that are given up


class _Hanging(LocalFileSystem):  # type: ignore[misc]
    """Opens files when ``goes_on`` is set; ``has_begun`` to do it."""

    cachable = False
    goes_on: ClassVar[threading.Event]
    has_begun: ClassVar[threading.Event]

    def open(self, *arguments: Any, **options: Any) -> Any:
        goes_on = self.goes_on
        self.has_begun.set()
        goes_on.wait()
        return super().open(*arguments, **options)


def test_threads_that_are_given_up_hold_nothing_that_new_ones_need(tmp_path: Path):
    """Not the object that they look at, nor a turn, of which there is only one after a failure."""
    (tmp_path / "a").write_bytes(b"abc")
    access = Access(Storage(filesystem=_Hanging(), requests=1))
    hang, _Hanging.has_begun = threading.Event(), threading.Event()
    _Hanging.goes_on = hang
    file = listed(tmp_path / "a", access)
    hung = access.fetch(file, 0, 3)
    _Hanging.has_begun.wait()
    _Hanging.goes_on = threading.Event()
    _Hanging.goes_on.set()
    access.abandon()
    assert access.fetch(file, 0, 3).result(LONG_S) == b"abc"
    assert not hung.done()
    hang.set()
    assert hung.result(LONG_S) == b"abc"


# ------------------------------------------------------------------------------------------------- credentials


class _Guarded(LocalFileSystem):  # type: ignore[misc]
    """Opens files for whoever has the key that is in ``key_file``, as it was when the file system was made."""

    key_file: ClassVar[Path]
    taken: ClassVar[str] = "old"
    made: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._key = self.key_file.read_text()
        type(self).made += 1

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self._key != self.taken or "forbidden" in path:
            raise PermissionError(f"{path}: {self._key} is refused")
        return super().open(path, *arguments, **options)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Access:
    """The access to ``tmp_path``, with the key "old"; and file systems are gone that other tests have made."""
    monkeypatch.setattr(_Guarded, "key_file", tmp_path / "key", raising=False)
    monkeypatch.setattr(_Guarded, "taken", "old")
    (tmp_path / "key").write_text("old")
    _Guarded.clear_instance_cache()
    for name in ("a", "forbidden"):
        (tmp_path / name).write_bytes(b"abc")
    access = Access(Storage(filesystem=_Guarded(), retry_s=1.0))
    monkeypatch.setattr(_Guarded, "made", 1)
    return access


def test_a_file_system_that_is_given_is_made_anew_when_it_is_refused(guarded: Access, tmp_path: Path):
    file = listed(tmp_path / "a", guarded)
    assert guarded.fetch(file, 0, 3).result(LONG_S) == b"abc"
    _Guarded.taken = "new"
    (tmp_path / "key").write_text("new")
    unopened = file._replace(mtime_ns=0)
    assert guarded.fetch(unopened, 0, 3).result(LONG_S) == b"abc"
    assert _Guarded.made == 2


def test_what_was_never_accepted_is_refused_at_once(guarded: Access, tmp_path: Path):
    _Guarded.taken = "new"
    file = ShardFile(f"local://{tmp_path}/a", 3, 0)
    with pytest.raises(StorageError, match="refuses the credentials") as caught:
        guarded.fetch(file, 0, 3).result(LONG_S)
    assert "tried for" not in caught.value.message and "Renew them" in caught.value.hint and _Guarded.made == 1


def test_where_only_one_object_is_refused_others_go_on(guarded: Access, tmp_path: Path):
    forbidden = ShardFile(f"local://{tmp_path}/forbidden", 3, 0)
    file, is_over = listed(tmp_path / "a", guarded), threading.Event()

    def read_on() -> None:
        while not is_over.is_set():
            assert guarded.fetch(file._replace(mtime_ns=0), 0, 3).result(LONG_S) == b"abc"

    others = threading.Thread(target=read_on)
    guarded.fetch(file, 0, 3).result(LONG_S)
    others.start()
    with pytest.raises(StorageError, match=r"forbidden.* is refused"):
        guarded.fetch(forbidden, 0, 3).result(LONG_S)
    is_over.set()
    others.join()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("scheme", ["memory", "fsspec+memory"])
def test_memory_is_no_storage(scheme: str):
    with pytest.raises(ShardReadError, match="workers cannot read it") as caught:
        list_shards(f"{scheme}://a/b.tfrecord")
    assert "Workers are other processes" in caught.value.hint


def test_a_file_system_in_memory_is_no_storage():
    from fsspec.implementations.memory import MemoryFileSystem

    with pytest.raises(OptionError, match="that other processes can read") as caught:
        Storage(filesystem=MemoryFileSystem())
    assert "Workers are other processes" in caught.value.hint


def test_a_host_that_nobody_knows_is_not_asked_again():
    uri = "s3://a:b@bucket/a?endpoint_override=there-is-none.invalid&region=x"
    with pytest.raises(StorageError, match=r"there is no host there-is-none\.invalid") as caught:
        list_shards(uri)
    assert "Asked was there-is-none.invalid, with the key in the URI" in caught.value.hint


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("abfs://box@account.dfs.core.windows.net/a/b%20c", "box/a/b c"),
        ("abfs://account.blob.core.windows.net/box/a", "box/a"),
    ],
)
def test_paths_of_azure(uri: str, path: str):
    assert Access().locate(uri)[1] == path
