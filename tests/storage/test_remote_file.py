"""Shards of an object store, read in pieces that are fetched ahead."""

from __future__ import annotations

import errno
import gzip
import io
import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import Damage, ShardReadError, StorageError
from loaderd.formats.blocks import BlockReader
from loaderd.formats.reader import Reading
from loaderd.formats.shard_index import build_index
from loaderd.options import Storage
from loaderd.storage.access import PIECE_BYTES, Access
from loaderd.storage.files import list_shards, open_shard
from loaderd.storage.remote_file import RemoteFile
from loaderd.storage.shard_file import ShardFile
from tests.formats.shard_bytes import Records, blocks_of, frames, take


class Store:
    """What pyarrow asks of a file system of ``fsspec``: this machine's files, which fail from ``fails_from`` on."""

    protocol = "store"

    def __init__(self) -> None:
        self.fails_from = 1 << 40

    def info(self, path: str) -> dict[str, Any]:
        status = Path(path).stat()
        return {"name": path, "size": status.st_size, "type": "file", "mtime": status.st_mtime}

    def isfile(self, path: str) -> bool:
        return True

    def open(self, path: str, mode: str) -> io.FileIO:
        store = self

        class File(io.FileIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() >= store.fails_from:
                    raise OSError(errno.EIO, "away")
                return super().read(size)

        return File(path)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def access(store: Store) -> Access:
    return Access(Storage(filesystem=store, retry_s=0.0))


def listed(path: Path, access: Access) -> ShardFile:
    (file,) = list_shards(f"store://{path}", access=access)
    return file


@pytest.mark.parametrize("is_back", [True, False])
def test_what_failed_ahead_is_asked_for_again(store: Store, access: Access, tmp_path: Path, is_back: bool):
    data = b"0123456" * PIECE_BYTES
    (tmp_path / "a").write_bytes(data)
    opened: Any = open_shard(listed(tmp_path / "a", access), access)
    store.fails_from = PIECE_BYTES
    view = memoryview(bytearray(len(data)))
    assert opened.read_at(0, view[:10]) == 10
    wait(opened._pieces.values())
    opened.check_unchanged()  # nobody needs what failed
    if is_back:
        store.fails_from = len(data)
    else:
        with pytest.raises(StorageError, match="away"):
            opened.read_at(0, view)
        opened.check_unchanged()
        store.fails_from = len(data)
    assert opened.read_at(0, view) == len(data) and view == data


def test_storage_that_cannot_be_asked(access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "a").write_bytes(b"abc")
    file = listed(tmp_path / "a", access)
    access.abandon()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    access.fetch_ahead(file)
    for ask in (
        lambda: open_shard(file, access).read_at(0, memoryview(bytearray(3))),
        lambda: listed(tmp_path, access),
    ):
        with pytest.raises(StorageError, match="the storage cannot be asked: can't start new thread") as caught:
            ask()
        assert "raise `ulimit -u`" in caught.value.hint


def test_what_was_read_ahead_is_kept_for_the_next_read(access: Access, tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(5 * PIECE_BYTES))
    file = listed(tmp_path / "a", access)
    opened = open_shard(file, access)
    view = memoryview(bytearray(PIECE_BYTES // 2))
    for offset in range(0, file.size_bytes, len(view)):
        opened.read_at(offset, view)
        opened.check_unchanged()
    assert access.take_counts().bytes == file.size_bytes


def test_pieces_of_one_file_at_a_time_are_kept(access: Access, tmp_path: Path):
    payloads = [bytes([number]) * (PIECE_BYTES // 10) for number in range(40)]
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(gzip.compress(frames(payloads), compresslevel=0))
    files = [listed(tmp_path / f"{number}", access) for number in range(3)]
    indexes = [build_index(file, 8, access=access) for file in files]
    reader = BlockReader(files, ["gzip"] * 3, Reading(access=access))
    for number in (0, 1, 2, 0):
        block = blocks_of(indexes[number], number)[0]
        records: Records = {}
        for found in reader.read(block, 10, 20):
            assert not isinstance(found, Damage)
            take(records, found, found.first_record)
        assert [records[number] for number in range(10, 20)] == payloads[10:20]
        held = [len(opened._pieces) for opened in reader._open.values() if isinstance(opened, RemoteFile)]
        assert 1 <= sum(held) <= 5, "a file has five pieces"
    reader.close()


def test_what_has_replaced_a_shard_that_is_read_as_a_stream_is_refused(access: Access, tmp_path: Path):
    """Even if it is of the same size, and the one before was looked at a moment ago."""
    payloads = [[bytes([number, other]) for number in range(100)] for other in range(2)]
    contents = [gzip.compress(frames(each), 0, mtime=0) for each in payloads]
    (tmp_path / "a").write_bytes(contents[0])
    file = listed(tmp_path / "a", access)
    index = build_index(file, 8, access=access)
    reader = BlockReader([file], ["gzip"], Reading(access=access))
    (block,) = blocks_of(index, 0)
    assert len(list(reader.read(block, 0, 5))) == 1
    reader.close_files()
    assert len(contents[0]) == len(contents[1])
    (tmp_path / "a").write_bytes(contents[1])
    os.utime(tmp_path / "a", (1, 1))
    with pytest.raises(ShardReadError, match="changed while it was in use"):
        list(reader.read(block, 0, 5))
    reader.close()
