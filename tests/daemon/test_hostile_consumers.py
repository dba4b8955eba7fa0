"""Consumers that write and send what no consumer should: it harms themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import ServedDaemon, flat, serve

from loaderd.memory.page import CONSUMER
from loaderd.plan.passes import Pass

Write = Callable[..., list[Path]]

MODULE = """
import loaderd

features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
schema = loaderd.Schema(features, {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")})
train = loaderd.Dataset("%(folder)s/shards/*.tfrecord", schema)
growing = loaderd.Dataset("%(folder)s/shards/*.tfrecord", schema, refresh="epoch")
"""


@pytest.fixture
def daemon(write_numbered: Write, tmp_path: Path) -> Iterator[ServedDaemon]:
    write_numbered([100])
    with serve(tmp_path, "few_numbers", MODULE % {"folder": tmp_path}, "train", "growing") as daemon:
        yield daemon


@pytest.mark.parametrize("number", [1 << 62, (1 << 63) - 1, -1, -(1 << 63)])
def test_any_number_in_its_page(daemon: ServedDaemon, number: int):
    hostile, other = daemon.subscribe(), daemon.subscribe()
    hostile.start(Pass(0, None)).wait_for_batch()
    for word in range(CONSUMER.start, CONSUMER.stop):
        hostile.page.words[word] = number
    assert len(daemon.report()["consumers"]) == 2
    assert sorted(flat(other.read())) == list(range(100))
