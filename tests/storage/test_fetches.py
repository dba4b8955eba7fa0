"""Blocks that are fetched ahead of their use, as often as they are used."""

from __future__ import annotations

from pathlib import Path

from pyarrow import fs

from loaderd.options import Storage
from loaderd.storage.access import Access
from loaderd.storage.fetches import Fetches
from loaderd.storage.files import list_shards


def test_a_block_is_used_more_often_than_it_was_begun(tmp_path: Path):
    """A load that has it twice was not begun, for too much was on its way; a later one was, that has it once."""
    (tmp_path / "a").write_bytes(b"0123456789")
    access = Access(Storage(filesystem=fs.LocalFileSystem()))
    fetches = Fetches(list_shards(f"near://{tmp_path}/a", access=access), access)
    block = (0, 2, 3)
    fetches.begin([block])
    for _ in range(2):
        views = [bytearray(3), bytearray(3)]
        fetches.take_into([block, block], [memoryview(view) for view in views])
        assert views == [b"234", b"234"]
    assert not fetches._fetches and not fetches._ahead_bytes
