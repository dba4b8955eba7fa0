"""A server that tests kill and start again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import loaderd
from tests.helpers.serving import Server

MODULE = """
import loaderd
schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
train = loaderd.Dataset("shards/*.tfrecord", schema, loaderd.Shuffle(window_records=60, block_records=10), seed=3)
"""


class Restarted:
    """A server that can be killed, and started again at the same place."""

    def __init__(self, folder: Path) -> None:
        """``folder`` holds the folder "shards"."""
        (folder / "sets.py").write_text(MODULE)
        self.folder = folder
        self.address = f"unix://{folder}/x.sock"
        self.start()

    def start(self) -> None:
        self.now = Server(self.folder, "sets:train", "--workers", "1")
        self.now.wait_line("connect with")

    def kill(self) -> None:
        """All of it, at once."""
        self.now.close()

    def kill_daemon(self) -> None:
        """The supervisor starts another one."""
        os.kill(self.now.daemon, signal.SIGKILL)

    def restart(self) -> None:
        self.kill()
        self.start()

    def connect(self, batch_size: int = 20, **options: Any) -> loaderd.Loader:
        return loaderd.connect(self.address, dataset="train", batch_size=batch_size, **options)
