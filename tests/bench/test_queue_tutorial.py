"""The experiment of the queue tutorial: everyone trains on the same numbers, and the figures are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import queue_tutorial as tutorial

import loaderd

pytestmark = pytest.mark.slow

STEPS = 24


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one tiny experiment."""
    folder = tmp_path_factory.mktemp("queue")
    sizes = ["--steps", str(STEPS), "--hidden", "16", "--rounds", "1"]
    places = ["--work-dir", str(folder), "--results-dir", str(folder)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [tutorial.__file__, *sizes, *places])
        tutorial.main()
    assert ended.value.code == 0
    return folder


def _runs(results: Path) -> dict[str, dict[str, Any]]:
    lines = (results / "queue_tutorial.jsonl").read_text().splitlines()
    return {run["feeder"]: run for run in map(json.loads, lines)}


def test_all_train_on_what_the_shards_hold(results: Path) -> None:
    shards = str(results / f"queue_tutorial-{STEPS}" / "*.tfrecord")
    with loaderd.Loader(shards, tutorial.SCHEMA, batch_size=100) as loader:
        sums = [batch["x"].view(np.uint32).sum(dtype=np.uint32) for batch in loader]
        assert loader.statistics().records_delivered == STEPS * 128
    runs = _runs(results)
    assert list(runs) == list(tutorial.FEEDERS)
    for feeder in ("feed_dict", "queue", "loaderd_session", "loaderd_function"):
        assert runs[feeder]["checksum"] == int(np.sum(sums, dtype=np.uint64)) % 2**32, feeder
    assert runs["in_memory"]["checksum"] == tutorial.checksum_of(tutorial.make_batch(0)) * STEPS % 2**32


def test_the_page_has_a_row_for_each(results: Path) -> None:
    page = (results / "queue_tutorial.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(tutorial.FEEDERS)
    assert f"trained on the same {STEPS * 128:,} rows of 1024" in page
