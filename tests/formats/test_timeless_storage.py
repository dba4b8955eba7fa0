"""Storage that tells no time of change: what was kept of an object is not taken for that of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from loaderd.formats.indexer import IndexResult, find_indexes
from loaderd.options import Storage
from loaderd.snapshots import StorageCounts
from loaderd.storage import access as access_module
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from tests.helpers.fixed_files import RECORDS, records_from


class _Timeless(fs.FileSystemHandler):
    """This machine's files, without their times."""

    def __init__(self) -> None:
        self._files = fs.LocalFileSystem()

    def get_type_name(self) -> str:
        return "timeless"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [fs.FileInfo(info.path, info.type, size=info.size) for info in self._files.get_file_info(paths)]

    def open_input_file(self, path: str) -> Any:
        return self._files.open_input_file(path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    get_file_info_selector = open_input_stream = open_output_stream = open_append_stream = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = (
        _refuse
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shard").write_bytes(records_from(0, 50).tobytes())
    return tmp_path


def indexed(folder: Path) -> tuple[IndexResult, StorageCounts]:
    """As a process has it that was just started."""
    storage = Storage(filesystem=fs.PyFileSystem(_Timeless()), cache_dir=str(folder / "parts"))
    access = Access(storage)
    (file,) = list_shards(f"timeless://{folder}/shard", access=access)
    assert file.mtime_ns == 0
    (found,) = find_indexes(str(folder / "indexes"), 7, RECORDS, [file], access=access)
    return found, access.take_counts()


def say_etag(monkeypatch: pytest.MonkeyPatch, etag: bytes | None) -> None:
    monkeypatch.setattr(access_module, "_version", lambda handle: (0, etag))


def test_nothing_is_kept_of_what_cannot_be_told_apart(folder: Path):
    before, _ = indexed(folder)
    (folder / "shard").write_bytes(records_from(50, 50).tobytes())
    after, counts = indexed(folder)
    assert not after.is_known and after.index.digest != before.index.digest
    assert counts.cache_hits == 0 and not (folder / "parts").exists() and not (folder / "indexes").exists()


def test_parts_are_kept_under_the_etag(folder: Path, monkeypatch: pytest.MonkeyPatch):
    say_etag(monkeypatch, b"one")
    before, counts = indexed(folder)
    assert counts.cache_misses == 1
    again, counts = indexed(folder)
    assert (counts.cache_hits, counts.bytes) == (1, 0) and again.index.digest == before.index.digest
    (folder / "shard").write_bytes(records_from(50, 50).tobytes())
    say_etag(monkeypatch, b"two")
    after, counts = indexed(folder)
    assert counts.cache_hits == 0 and not after.is_known and after.index.digest != before.index.digest
