"""``torch_epoch`` with the DataLoader's options for this: ``timeout=…``, and ``persistent_workers=True``."""

from __future__ import annotations

from pathlib import Path

from trainers import Task, torch_epoch


class Epoch(torch_epoch.Epoch):
    def __init__(self, task: Task, saved: Path | None) -> None:
        super().__init__(task, saved, timeout=task.timeout_s, persistent_workers=True)
