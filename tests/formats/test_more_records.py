"""A compressed shard that is replaced, after it was indexed, by one of the same size and time with more records."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

import loaderd
from loaderd.errors import LoaderdError
from tests.helpers.fixed_files import DTYPE, RECORDS, SCHEMA, records_from, zstd


def test_more_records_than_were_indexed_are_damage(tmp_path: Path):
    path = tmp_path / "games.zst"
    path.write_bytes(zstd(records_from(0, 60).tobytes()))
    indexed = path.stat()
    with loaderd.Loader(path, SCHEMA, batch_size=10, workers=1, shuffle=False) as loader:
        assert sum(batch.num_records for batch in loader) == 60
    more = np.zeros(145, DTYPE)
    more["version"] = RECORDS.expect["version"]
    data = zstd(more.tobytes())
    skipped = bytes(indexed.st_size - len(data) - 8)  # a skippable frame: RFC 8878, 3.1.2
    path.write_bytes(data + struct.pack("<II", 0x184D2A50, len(skipped)) + skipped)
    os.utime(path, ns=(indexed.st_mtime_ns, indexed.st_mtime_ns))
    with loaderd.Loader(path, SCHEMA, batch_size=10, workers=1, shuffle=False) as loader:
        errors = []
        batches = iter(loader)
        while True:
            try:
                next(batches)
            except StopIteration:
                break
            except LoaderdError as error:
                errors.append(str(error))
    assert len(errors) == 6 and all("IndexError" not in text and "games.zst" in text for text in errors)
