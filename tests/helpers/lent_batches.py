"""A loader that the tests of a binding share, and that has all its slots back before and after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import loaderd

RECORDS, BATCH_SIZE, HELD = 150, 16, 4
NUM_BATCHES = 10  # of which the last one has 6 records
_LIMIT_S = 60.0

CHECK_WARNING = """
import warnings
for given in ({}, {"shard": (0, 1)}):
    with warnings.catch_warnings(record=True) as caught, loaderd.Loader(
        f"{folder}/shards/*", schema, batch_size=16, workers=1, **given
    ) as loader:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in loader:
                pass
    ours = [(str(one.message), one.category, one.filename) for one in caught if "loaderd" in str(one.message)]
    text = f"{name}.distributed has 2 processes, and this loader has no shard=: all of them get the same batches."
    text += f" Give each its share, shard=loaderd_{name}.shard(); or shard=(0, 1), if that is meant."
    assert ours == ([] if given else [(text, UserWarning, "<string>")]), ours
"""
"""For a process of a training of two, with ``folder``, ``schema``, and ``name``, the framework's."""

Write = Callable[[Path, Sequence[int]], list[Path]]


def loader_fixtures(schema: loaderd.Schema, settle: Callable[[], object] | None = None) -> tuple[Any, Any, Any]:
    """Three fixtures of a module: ``shards``, ``shared_loader`` and ``loader``.

    ``settle``: has the framework give back batches that nobody refers to any more; called until all have come back.
    None: they come back at once.
    """

    @pytest.fixture(scope="module")
    def shards(tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Write) -> list[Path]:
        return write_numbered_to(tmp_path_factory.mktemp("shards"), [100, 50])

    @pytest.fixture(scope="module")
    def shared_loader(shards: list[Path]) -> Iterator[loaderd.Loader]:
        with loaderd.Loader(shards, schema, batch_size=BATCH_SIZE, workers=1, held_batches=HELD) as loader:
            yield loader

    @pytest.fixture
    def loader(shared_loader: loaderd.Loader) -> Iterator[loaderd.Loader]:
        shared_loader.load_state_dict(loaderd.Position())
        yield shared_loader
        until_s = time.monotonic() + _LIMIT_S
        while shared_loader.statistics().slots_lent and settle is not None and time.monotonic() < until_s:
            settle()
        assert shared_loader.statistics().slots_lent == 0

    return shards, shared_loader, loader
