"""The plan of a large data set is measured on indexes such as real shards have, and a hundredth takes a hundredth."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import scale


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
