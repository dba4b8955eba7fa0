"""The trainings that say how busy a GPU is, on a CPU: their records, and the one in Keras. Others: bindings_torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records

import loaderd
from tests.helpers.feed_table import check_table

Start = Any  # of conftest.py: start("gpu/keras_train.py", *arguments)


@pytest.fixture(scope="module")
def shards(start: Start, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    with start("gpu/make_shards.py", "--out", folder, "--records", 2000, "--processes", 1) as writing:
        assert "1 shards, 2,000 records" in writing.end()
    with start("gpu/make_shards.py", "--out", folder) as again:
        assert "holds shards already" in again.end(status=1)
    return [str(path) for path in folder.glob("*/*.tfrecord")]


def test_the_reader_in_numpy_gives_what_loaderd_does(shards: list[str]) -> None:
    with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=2000, shuffle=False) as loader:
        expected = next(iter(loader)).copy()
    (board, flags), score = records.unpack(records.read_rows(shards[0]))
    np.testing.assert_array_equal(board, expected["board"])
    np.testing.assert_array_equal(flags, expected["flags"])
    np.testing.assert_array_equal(score, expected["score"])
    assert score.std() > 0.1, "there is something to learn"
    rows = records.packed_batches(shards, 300, seed=0)
    several = np.concatenate([next(rows) for _ in range(20)])
    assert sorted(several["d"].tobytes()) == sorted(records.read_rows(shards[0])["d"].tobytes() * 3)


def test_keras_trains_on_each_feed(start: Start, shards: list[str]) -> None:
    sizes = ["--batch-size", 64, "--seconds", 0.1, "--filters", 2, "--workers", 1, "--device", "cpu"]
    with start("gpu/keras_train.py", "--data", Path(shards[0]).parent / "*.tfrecord", *sizes) as training:
        check_table(training.end(), "Keras")
