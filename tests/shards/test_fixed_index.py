"""The index pass over records of fixed size, where reading itself fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixed_files import RECORDS, records_from, wrapped

from loaderd.errors import ShardReadError, StorageError
from loaderd.shards import fixed_index
from loaderd.shards.files import list_shards
from loaderd.shards.fixed_index import build_fixed_index
from loaderd.shards.local_file import LocalFile


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
