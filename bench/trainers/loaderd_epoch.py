"""loaderd: ``Loader``. Windows of 4,096 records, so that several are loaded in an epoch as short as this one.

Resumes from ``loader.position``; skips with ``on_corrupt="skip_record"``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import loaderd
from trainers import RECORD_BYTES, WORKERS, Batch, Task

SCHEMA = loaderd.Schema(
    features={"d": loaderd.PackedBits(8 * RECORD_BYTES), "s": loaderd.Int64()},
    fields={"d": loaderd.Packed("d"), "s": loaderd.Array("s", dtype="int64")},
)


class Epoch:
    def __init__(self, task: Task, saved: Path | None) -> None:
        self._loader = loaderd.Loader(
            task.shards,
            SCHEMA,
            batch_size=task.batch_size,
            shuffle=loaderd.Shuffle(window_records=4096, block_records=256),
            workers=WORKERS,
            on_corrupt="skip_record" if task.skip else "raise",
            stall_timeout=task.timeout_s,
            index_cache=str(Path(task.folder, "index")),
            start=loaderd.Position.from_json(saved.read_text()) if saved else None,
        )
        self._iterator = iter(self._loader)

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return np.asarray(batch["d"]), np.asarray(batch["s"])

    def save(self, path: Path) -> None:
        path.write_text(self._loader.position.to_json())

    def close(self) -> str:
        damages = self._loader.statistics().damages
        self._loader.close()
        return "\n".join(map(str, damages))
