"""Servers as users start them, of small shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import MODULE, Server


@pytest.fixture
def start(tmp_path: Path, write_numbered: Callable[[Sequence[int]], list[Path]]) -> Iterator[Callable[..., Server]]:
    """Starts a server of 2 workers in a folder with the module ``sets`` (``MODULE``) and its shards."""
    write_numbered([100, 200])
    (tmp_path / "sets.py").write_text(MODULE)
    servers: list[Server] = []

    def start(*targets: str, arguments: Sequence[str] = (), **others: Any) -> Server:
        """``others``: of Server."""
        servers.append(Server(tmp_path, *(targets or ("sets:train",)), "--workers", "2", *arguments, **others))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]
) -> Iterator[Server]:
    """One that is ready, for tests that do no harm to it."""
    folder = tmp_path_factory.mktemp("server")
    write_numbered_to(folder / "shards", [100, 200])
    (folder / "sets.py").write_text(MODULE)
    server = Server(folder, "sets:train", "sets:valid", "--workers", "2")
    server.wait_line("memory:")
    yield server
    server.close()
