"""Nothing of a server lies in /dev/shm: a container has 64 MB of it, and what a killed process has there stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import loaderd
from tests.helpers.serving import MODULE, Server
from tests.reliability.processes import shm_names


def of_this_user() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == os.getuid()}


@pytest.mark.parametrize("network", [False, True], ids=["unix", "network"])
def test_a_server_has_no_name_in_dev_shm(write_numbered: Callable[..., list[Path]], tmp_path: Path, network: bool):
    """While it serves, and when it was killed."""
    write_numbered([100, 200])
    (tmp_path / "sets.py").write_text(MODULE)
    server = Server(tmp_path, "sets:train", "--workers", "2", network=network)
    try:
        with loaderd.connect(server.address, "train", batch_size=10) as loader:
            assert sum(len(batch["id"]) for batch in loader) == 300
            assert len(server.family()) > 2 and shm_names(server.family()) == set()
    finally:
        server.close()
    assert not [name for name in of_this_user() if "loaderd" in name or str(server.process.pid) in name]
