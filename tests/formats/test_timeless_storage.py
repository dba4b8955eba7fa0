"""Storage that tells no time of change: what was kept of an object is not taken for that of another."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from loaderd.errors import ShardReadError
from loaderd.formats.blocks import BlockReader
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.indexer import IndexResult, find_indexes
from loaderd.formats.reader import Reading
from loaderd.kernels.crc import framed
from loaderd.options import Storage
from loaderd.schema import FixedRecords
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Block
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


def indexed(folder: Path, records: FixedRecords | None = RECORDS) -> tuple[IndexResult, Access]:
    """As a process has it that was just started."""
    storage = Storage(filesystem=fs.PyFileSystem(_Timeless()), cache_dir=str(folder / "parts"))
    access = Access(storage)
    (file,) = list_shards(f"timeless://{folder}/shard", access=access)
    assert file.mtime_ns == 0
    (found,) = find_indexes(str(folder / "indexes"), 7, records, [file], access=access)
    return found, access


def test_nothing_is_kept_of_what_cannot_be_told_apart(folder: Path):
    before, _ = indexed(folder)
    (folder / "shard").write_bytes(records_from(50, 50).tobytes())
    after, access = indexed(folder)
    counts = access.take_counts()
    assert not after.is_known and after.index.digest != before.index.digest
    assert counts.cache_hits == 0 and not (folder / "parts").exists() and not (folder / "indexes").exists()


def reader_of(found: IndexResult, access: Access, records: FixedRecords | None) -> BlockReader | FixedBlockReader:
    args = [found.index.file], [found.index.compression], Reading(access=access)
    return BlockReader(*args) if records is None else FixedBlockReader(records, *args)


@pytest.mark.parametrize("kind", ["tfrecord", "fixed", "gzip"])
def test_a_block_of_another_object_is_refused_for_its_content(folder: Path, kind: str):
    """Also where it is read alone, because another block of its group is damaged."""
    lengths = [20] * 128

    def write(fill: int) -> None:
        if kind == "tfrecord":
            (folder / "shard").write_bytes(b"".join(framed(bytes([fill]) * length) for length in lengths))
        else:
            data = records_from(50 * fill, 50).tobytes()
            (folder / "shard").write_bytes(gzip.compress(data, 0) if kind == "gzip" else data)

    write(0)
    records = None if kind == "tfrecord" else RECORDS
    found, access = indexed(folder, records)
    blocks = [Block(0, *found.index.block(number)) for number in range(len(found.index.counts))]
    reader = reader_of(found, access, records)
    assert reader.narrowed(blocks[0], 1, 2) == blocks[0] and reader.read_together(blocks) is not None
    assert sum(piece.num_records for block in blocks for piece in reader.read(block, 0, 1)) >= 50  # type: ignore[union-attr]
    lengths[40], lengths[70] = 21, 19  # frames behind the first are moved, up to the second
    write(1)
    refused = r"changed while it was in use: expected CRC32C 0x\w+ of records"
    for block in blocks:
        with pytest.raises(ShardReadError, match=refused):
            list(reader_of(found, access, records).read(block, 0, 1))
    if kind != "tfrecord":
        with pytest.raises(ShardReadError, match=refused):
            reader_of(found, access, records).read_together(blocks[-1:])


def test_the_error_says_what_to_do_where_size_and_time_are_the_same(folder: Path):
    access = Access(Storage(filesystem=fs.LocalFileSystem()))
    (file,) = list_shards(f"timed://{folder}/shard", access=access)
    (found,) = find_indexes(str(folder / "indexes"), 7, RECORDS, [file], access=access)
    block = Block(0, *found.index.block(0))
    (folder / "shard").write_bytes(records_from(50, 50).tobytes())
    os.utime(folder / "shard", ns=(file.mtime_ns, file.mtime_ns))
    with pytest.raises(ShardReadError) as refused:
        reader_of(found, access, RECORDS).read_together([block])
    assert "Upload it again" in refused.value.hint and 'index_cache="none"' in refused.value.hint
