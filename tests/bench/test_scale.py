"""The plan of a large data set is measured on indexes such as real shards have, and a hundredth takes a hundredth."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scale

from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.formats.shard_index import decode_indexes, encode_indexes


def test_a_hundred_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = ["--shards", "100", "--records", "10000000", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [scale.__file__, *sizes, "--results-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        scale.main()
    assert ended.value.code == 0
    (run,) = map(json.loads, (tmp_path / "scale.jsonl").read_text().splitlines())
    assert (run["records"], run["blocks"]) == (10_000_000, 9_800)
    assert 256 <= run["slices"] <= 272, "262,144 rows in blocks of 1,024 and, the last of a shard, of 672"
    assert list(run["seconds"]) == list(run["megabytes"]) == list(scale.STEPS)
    assert 0.6 < run["megabytes"][scale.STEPS[0]] < 15, "at least 2 bytes for 32 records"
    assert sum(run["seconds"].values()) < scale.SECONDS
    page = (tmp_path / "scale.md").read_text()
    assert "10,000,000 records in 100 shards, 9,800 blocks" in page and "| in all | " in page


def test_the_made_up_indexes_are_such_as_shards_have():
    """Blocks touch one another, runs lie in them, and the sizes are those of the records."""
    made = scale.made_up_index(3, 100_000)
    (index,) = decode_indexes(encode_indexes([made]))
    assert index.num_records == 100_000 and index.counts.max() == 1024 and len(index.counts) == 98
    blocks = [index.block(number) for number in range(98)]
    for (offset, num_bytes, count, first, _), following in zip(blocks, [*blocks[1:], None], strict=True):
        assert following is None or (offset + num_bytes, first + count) == (following[0], following[3])
    for _, num_bytes, count, _, anchors in blocks:
        lengths = np.diff(np.frombuffer(anchors, "<u4"), append=num_bytes)
        assert (
            len(lengths) == -(-count // 32)
            and anchors[:4] == bytes(4)
            and (abs(lengths[:-1] / 32 - scale.RECORD_BYTES) < 4).all()
        )
        assert len(set(lengths.tolist())) > 10, "as records of different lengths"
    assert index.file.size_bytes == blocks[-1][0] + blocks[-1][1]
    assert index.runs.dtype.itemsize == 2
    assert BlockTable([index, scale.made_up_index(4, 5)], "raise").num_records == 100_005
