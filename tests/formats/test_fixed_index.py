"""The index pass over records of fixed size, where reading itself fails, and over what only looks like a shard."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.errors import ShardFormatError, ShardReadError, StorageError
from loaderd.formats import fixed_index
from loaderd.formats.fixed_index import build_fixed_index, build_fixed_indexes
from loaderd.formats.indexer import make_indexes
from loaderd.formats.shard_index import encode_indexes
from loaderd.storage.files import list_shards
from loaderd.storage.local_file import LocalFile
from tests.formats.shard_bytes import make_shard
from tests.helpers.fixed_files import RECORDS, records_from, tar_of, wrapped, zstd


@pytest.mark.parametrize("error", [StorageError("it does not answer"), ShardReadError("it may not be read")])
@pytest.mark.parametrize("how", ["npz", "tar", "zstd"])
def test_a_read_that_fails_is_no_damage(how: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever read it is: what is noted as damage is kept in the index, and lost at every later start."""
    monkeypatch.setattr(fixed_index, "_MAX_AT_ONCE_BYTES", 0)
    (tmp_path / "a").write_bytes(wrapped(records_from(0, 60), how))
    (file,) = list_shards(tmp_path / "a")
    read_at, left = LocalFile.read_at, 0

    def read(opened: LocalFile, offset: int, view: memoryview) -> int:
        nonlocal left
        left -= 1
        if not left:
            raise error
        return read_at(opened, offset, view)

    monkeypatch.setattr(LocalFile, "read_at", read)
    build_fixed_index(file, RECORDS, 7)
    for number in range(1, 1 - left):
        left = number
        with pytest.raises(type(error), match=str(error)):
            build_fixed_index(file, RECORDS, 7)


@pytest.mark.parametrize("harm", ["none", "crc", "cut", "short", "members", "text", "plain", "empty", "zlib"])
def test_small_gzip_files_are_indexed_together_as_alone(tmp_path: Path, harm: str):
    games = [gzip.compress(records_from(first, count).tobytes()) for first, count in ((0, 9), (9, 1), (10, 30))]
    data = records_from(9, 20).tobytes()
    games[1] = {
        "none": games[1],
        "crc": games[1][:-8] + bytes(8),
        "cut": games[1][:-9],
        "short": gzip.compress(data[:-1]),
        "members": gzip.compress(data[:40]) + gzip.compress(data[40:]),
        "text": gzip.compress(b"no record, but text that goes on and on" * 9),
        "plain": data,
        "empty": gzip.compress(b""),
        "zlib": zlib.compress(data),
    }[harm]
    files = [make_shard(tmp_path / f"{number}.gz", game) for number, game in enumerate(games)]
    together = build_fixed_indexes(files, RECORDS)
    assert (together is not None) == (harm == "none")
    alone = [make_indexes([file], RECORDS, 7)[0] for file in files]
    for found in (together or (), make_indexes(files, RECORDS, 7)):
        for one, other_one in zip(found, alone, strict=False):
            assert encode_indexes([one]) == encode_indexes([other_one]) and str(one.error) == str(other_one.error)


def test_tars_that_were_joined(tmp_path: Path):
    data = wrapped(records_from(0, 30), "tar")
    file = make_shard(tmp_path / "a.tar", data + data)
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert "something behind the tar's end" in damage.found and damage.record == 30
    assert damage.lost_bytes == 2 * len(data) - damage.offset and damage.offset < len(data)
    assert index.num_records == 30


def test_a_tar_without_members_has_no_records(tmp_path: Path):
    """It is zeros alone, of which some records would fill the file."""
    data = tar_of([])
    records = loaderd.FixedRecords(np.dtype([("x", "u1", (16,))]))
    assert not any(data) and len(data) % records.record_bytes == 0
    index = build_fixed_index(make_shard(tmp_path / "a.tar", data), records, 7)
    assert not index.num_records and not index.damages
    assert build_fixed_index(make_shard(tmp_path / "a.bin", data), records, 7).num_records == len(data) // 16


def test_three_bytes_may_be_those_of_a_record(tmp_path: Path):
    whole = loaderd.FixedRecords(np.dtype([("x", "u1", (16,))]))
    plain = make_shard(tmp_path / "c.bin", b"BZh" + bytes(16 * 10 - 3))
    assert build_fixed_index(plain, whole, 7).num_records == 10


@pytest.mark.parametrize("at_once_bytes", [0, 1 << 20])
@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_compressed_file_of_another_kind(
    how: str, at_once_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fixed_index, "_MAX_AT_ONCE_BYTES", at_once_bytes)
    compress = gzip.compress if how == "gzip" else zstd
    records = loaderd.FixedRecords(np.dtype([("x", "u1", (16,))]))
    np.save(tmp_path / "a.npy", np.zeros((100, 16), np.uint8))
    array = (tmp_path / "a.npy").read_bytes()
    tar = tar_of([("a.gz", gzip.compress(bytes(160)))])
    for data, kind in ((tar, "a tar archive"), (array, "an array of numpy's (.npy)")):
        assert len(data) % records.record_bytes == 0
        file = make_shard(tmp_path / "a", compress(data))
        said = re.escape(f"holds {kind}, compressed with {how}, and not records of 16 bytes")
        with pytest.raises(ShardFormatError, match=said):
            build_fixed_index(file, records, 7)
        games = [("0.gz", gzip.compress(bytes(160))), ("1.zst", compress(data)), ("2.gz", gzip.compress(bytes(32)))]
        index = build_fixed_index(make_shard(tmp_path / "b.tar", tar_of(games)), records, 7)
        (damage,) = index.damages
        assert (
            damage.record == 10 and f"{kind}, compressed with {how}, in '1.zst', the member at byte" in damage.found
        )
        assert index.num_records == 12 and index.counts.tolist() == [10, 2]
