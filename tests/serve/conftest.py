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
