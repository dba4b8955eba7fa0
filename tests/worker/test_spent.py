"""The time of a load is told apart by its stages, of plain and of compressed shards."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.formats.blocks import Block
from loaderd.formats.reader import Reading
from loaderd.formats.shard_index import build_index
from loaderd.stages import Stage
from loaderd.storage.files import list_shards
from loaderd.worker.window_loader import BlockPlacement, WindowLoader


@pytest.mark.parametrize("compressed", [False, True])
def test_stages_add_up(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema, compressed: bool
):
    (path,) = write_numbered([20_000])
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    files = list_shards(str(path))
    index = build_index(files[0], 1024, lambda offset: None)
    blocks = [Block(0, *index.block(number)) for number in range(len(index.counts))]
    starts = np.cumsum([0, *[block.num_records for block in blocks]])
    parts = [
        BlockPlacement(block, np.arange(start, start + block.num_records))
        for block, start in zip(blocks, starts[:-1], strict=True)
    ]
    window = np.zeros((20_000, numbered_schema.row_bytes), np.uint8)
    for _ in range(10):  # until nothing else ran meanwhile, on a machine that does other things, too
        spent = [0] * len(Stage)
        loader = WindowLoader(numbered_schema, files, [index.compression], Reading(spent=spent))
        began_ns = time.monotonic_ns()
        assert not loader.load(parts, window)
        took_ns = time.monotonic_ns() - began_ns
        loader.close()
        if sum(spent) > 0.6 * took_ns and (not compressed or spent[Stage.INFLATE] > spent[Stage.READ]):
            break
    by_stage = dict(zip(Stage, spent, strict=True))
    idle = {Stage.FRAMES} if compressed else {Stage.INFLATE}
    assert {stage for stage, ns in by_stage.items() if ns == 0} == idle
    assert 0.6 * took_ns < sum(spent) <= took_ns, by_stage
    if compressed:
        assert by_stage[Stage.INFLATE] > by_stage[Stage.READ], "what is read meanwhile is not counted twice"
