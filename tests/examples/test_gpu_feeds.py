"""The trainings that say how busy a GPU is, on a CPU: their records, and the one in Keras. Others: bindings_torch."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

import measure
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


def test_waiting_is_told_by_the_same_step_on_a_batch_of_the_same_feed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step_s = {"framework": 0.01, "floats": 0.01, "floats again": 0.02, "packed": 0.002}
    now_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def slowly(batch: str) -> Iterator[str]:
        while True:
            pass_time(step_s[batch])
            yield batch

    def open_feed(batch: str) -> AbstractContextManager[Iterator[str]]:
        return nullcontext(slowly(batch) if batch == "framework" else repeat(batch))

    def train(net: None, batches: Iterator[str], clock: measure.Clock) -> float:
        for batch in batches:
            pass_time(step_s[batch])
            if clock.tick():
                break
        return 0.0

    def hold(batches: Iterator[str]) -> Iterator[str]:
        batch = next(batches)
        return repeat("floats again" if batch == "floats" else batch)

    monkeypatch.setattr(measure, "time", Namespace(perf_counter=lambda: now_s, process_time=lambda: 0.0))
    measure.run(
        "a framework",
        Namespace(gpu=None, batch_size=1, workers=1, nets=["nnue"], feeds=measure.FEEDS, seconds=0.1),
        nets={"nnue": lambda: None},
        feeds={name: lambda name=name: open_feed(name) for name in measure.FEEDS},
        train=train,
        take=lambda batches, clock: train(None, batches, clock),
        hold=hold,
    )
    waiting = dict(re.findall(r"^nnue +(\w+) .* (-?\d+)% ", capsys.readouterr().out, re.M))
    assert waiting["framework"] == "50", "it gives a batch in the time of a step"
    assert waiting["packed"] == "0", "it has a batch at once, for a step that is shorter than others"
    assert waiting["floats"] == "-100", "the steps with a batch at hand were the slower ones"


def test_keras_trains_on_each_feed(start: Start, shards: list[str]) -> None:
    sizes = ["--batch-size", 64, "--seconds", 0.1, "--filters", 2, "--workers", 1, "--device", "cpu"]
    with start("gpu/keras_train.py", "--data", Path(shards[0]).parent / "*.tfrecord", *sizes) as training:
        check_table(training.end(), "Keras")
