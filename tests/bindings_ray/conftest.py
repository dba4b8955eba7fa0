"""Clusters of several nodes on this machine, all of whose processes, grandchildren included, bear a mark."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bindings_ray.ray_cluster import MARK, MODULE, SIZES, LocalCluster, check_nothing_is_left


@pytest.fixture(scope="session")
def datasets(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]
) -> Path:
    """A folder with numbered shards and the module ``ray_datasets``, which servers import."""
    folder = tmp_path_factory.mktemp("datasets")
    write_numbered_to(folder / "shards", SIZES)
    (folder / "ray_datasets.py").write_text(MODULE)
    return folder


@contextlib.contextmanager
def _started(datasets: Path, cpus: Sequence[int]) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        mark = secrets.token_hex(8)
        patch.setenv(MARK, mark)
        cluster = LocalCluster(datasets, cpus)
        try:
            yield cluster
        finally:
            cluster.close()
            check_nothing_is_left(mark)


@pytest.fixture(scope="module")
def cluster(datasets: Path) -> Iterator[LocalCluster]:
    """Two nodes of two cores, for tests that do no harm to them; when it has ended, no process of it is left."""
    with _started(datasets, [2, 2]) as cluster:
        yield cluster


@pytest.fixture
def start_cluster(datasets: Path) -> Iterator[Callable[..., LocalCluster]]:
    """A cluster of nodes with so many cores each, the head first; when it has ended, no process of it is left."""
    with contextlib.ExitStack() as stack:

        def start(*cpus: int) -> LocalCluster:
            started: Any = stack.enter_context(_started(datasets, cpus))
            return started

        yield start
