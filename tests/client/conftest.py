"""A server that is killed and started again, and what its data set holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderd
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted

ORDER = {"shuffle": loaderd.Shuffle(window_records=60, block_records=10), "seed": 3}


@pytest.fixture
def server(tmp_path: Path, numbered: Numbered) -> Iterator[Restarted]:
    numbered.write([100, 50])
    started = Restarted(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def embedded(server: Restarted, numbered: Numbered) -> Callable[..., list[list[int]]]:
    """The numbers of the same data set's batches, of a loader with a daemon of its own."""

    def read(passes: int = 1, **options: Any) -> list[list[int]]:
        shards = str(server.folder / "shards" / "*.tfrecord")
        with numbered.loader(shards, **{"batch_size": 20, **ORDER, **options}) as loader:
            return [batch["id"].tolist() for _ in range(passes) for batch in loader]

    return read
