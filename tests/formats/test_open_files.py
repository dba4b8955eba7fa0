"""How many shards readers keep open, and what happens where no more may be open."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from loaderd.formats import reader as reader_module
from loaderd.formats.blocks import Block, BlockReader
from loaderd.formats.reader import Reading
from loaderd.formats.shard_index import build_index
from loaderd.kernels.crc import framed
from loaderd.options import Storage
from loaderd.storage.access import Access
from loaderd.storage.shard_file import ShardFile
from tests.formats.shard_bytes import blocks_of, make_shard, num_descriptors


def shards(folder: Path) -> tuple[list[ShardFile], list[Block]]:
    """Eight of a record each, and the blocks."""
    files = [make_shard(folder / f"{shard}", framed(bytes([shard]))) for shard in range(8)]
    return files, [blocks_of(build_index(file, 10), shard)[0] for shard, file in enumerate(files)]


def read(reader: BlockReader, *blocks: Block) -> list[int]:
    """The records, of a byte each."""
    found = reader.read_together(list(blocks))
    assert found is not None
    buffer, ends = found
    starts, _ = reader.payloads(ends)
    numbers: list[int] = buffer[starts].tolist()
    return numbers


def test_no_more_files_are_open_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "_MAX_OPEN_FILES", 3)
    files, blocks = shards(tmp_path)
    reader = BlockReader(files, ["none"] * 8)
    before = num_descriptors()
    for shard in (0, 1, 2, 3, 0, 7, 6, 5, 4, 0, 0):
        assert read(reader, blocks[shard]) == [shard]
        assert num_descriptors() <= before + 3
    assert read(reader, *blocks) == list(range(8))
    reader.close()
    assert num_descriptors() == before


def test_a_reader_that_may_open_no_more_files_has_those_of_others_closed(tmp_path: Path):
    """A worker of a server has a reader for each consumer."""
    files, blocks = shards(tmp_path)
    others = [BlockReader(files, ["none"] * 8) for _ in range(2)]
    for other in others:
        read(other, *blocks)
    reader = BlockReader(files, ["none"] * 8, Reading(access=Access(Storage(retry_s=0.2))))
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        for one in (reader, *others, reader):
            assert read(one, *blocks) == list(range(8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in (reader, *others):
            one.close()
