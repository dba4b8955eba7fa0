"""A file whose descriptor a network file system has forgotten."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import ShardReadError, StorageError
from loaderd.options import Storage
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards, open_shard
from loaderd.storage.local_file import LocalFile, read_whole

RETRY_S = 3.0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[LocalFile]:
    (tmp_path / "a").write_bytes(b"content")
    (file,) = list_shards(tmp_path / "a")
    opened = LocalFile(file, Access(Storage(retry_s=RETRY_S)))
    yield opened
    opened.close()


def fail_at_first(name: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of a function of ``os`` fails, and those after it do not."""
    call, errors = getattr(os, name), [error]

    def patched(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise OSError(errors.pop(), "of the mount")
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, patched)


def read(opened: LocalFile) -> bytes:
    data = bytearray(9)
    return bytes(data[: opened.read_at(0, memoryview(data))])


def test_a_shard_that_became_a_pipe_has_changed(tmp_path: Path):
    """To open a pipe waits until somebody writes to it. It may have been put there since the shards were listed."""
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    (file,) = list_shards(str(path))
    path.unlink()
    os.mkfifo(path)
    assert not read_whole(file, memoryview(bytearray(11)))
    with pytest.raises(ShardReadError, match="changed while it was in use"), closing(open_shard(file)):
        pass


def test_a_mount_that_comes_back_is_read_on(opened: LocalFile, monkeypatch: pytest.MonkeyPatch):
    fail_at_first("preadv", errno.ESTALE, monkeypatch)
    fail_at_first("open", errno.ESTALE, monkeypatch)
    assert read(opened) == b"content"
    opened.check_unchanged()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN])
@pytest.mark.parametrize("name", ["preadv", "fstat"])
def test_a_descriptor_that_is_forgotten_for_good(
    opened: LocalFile, name: str, error: int, monkeypatch: pytest.MonkeyPatch
):
    call, forgotten = getattr(os, name), opened._fd

    def patched(number: int, *arguments: Any) -> Any:
        if number == forgotten:
            raise OSError(error, "of the mount")
        return call(number, *arguments)

    def open_other(*arguments: Any) -> int:
        """Not the number that is free again."""
        number = real_open(*arguments)
        if number != forgotten:
            return number
        try:
            return os.dup(number)
        finally:
            os.close(number)

    real_open = os.open
    monkeypatch.setattr(os, "open", open_other)
    monkeypatch.setattr(os, name, patched)
    opened.check_unchanged()
    assert read(opened) == b"content"


@pytest.mark.parametrize(("name", "pattern"), [("scandir", "*"), ("stat", "a")])
def test_a_folder_of_a_mount_that_comes_back_is_listed(
    tmp_path: Path, name: str, pattern: str, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a").write_bytes(b"content")
    waited: list[None] = []
    access = Access(Storage(retry_s=RETRY_S), on_wait=lambda: waited.append(None))
    fail_at_first(name, errno.ESTALE, monkeypatch)
    assert [file.size_bytes for file in list_shards(f"{tmp_path}/{pattern}", access=access)] == [7]
    assert len(waited) == 1


def test_a_folder_of_a_mount_that_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(b"content")
    access = Access(Storage(retry_s=0.0))
    fail_at_first("scandir", errno.EIO, monkeypatch)
    with pytest.raises(StorageError, match="cannot be read: of the mount"):
        list_shards(f"{tmp_path}/*", access=access)
    fail_at_first("scandir", errno.EACCES, monkeypatch)
    with pytest.raises(ShardReadError, match="cannot be read: of the mount"):
        list_shards(f"{tmp_path}/*", access=access)
