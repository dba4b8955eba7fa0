"""Reading object stores, with a cache on the local disk that is too small."""

from __future__ import annotations

from pathlib import Path

from pyarrow import fs

from loaderd.options import Storage
from loaderd.shards.access import Access
from loaderd.shards.files import list_shards
from loaderd.shards.range_cache import PART_BYTES
from loaderd.shards.shard_file import ShardFile

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
