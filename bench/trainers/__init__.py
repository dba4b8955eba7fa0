"""Trainings to which accidents happen: a module a library, each a process of its own.

``python -m trainers NAME`` runs that of ``NAME_epoch.py``.

A module has a class ``Epoch``: an iterator over one epoch in batches of records that have ``d`` (``RECORD_BYTES``
bytes) and ``s`` (int64), made as the library's documentation recommends, with two workers, shuffled at least by file
from a seed. What a training has taken is in its log, a JSON object a line::

    {"keys": [...]}                a batch: a key for each record (key_of); written before the next batch is asked for
    {"error": "...", "at_s": …}    what next(), or making the epoch, raised, in full; by the monotonic clock
    {"reported": "..."}            at the end, what the library itself says of damage, if it keeps a list
    {"end": true, "at_s": …}       next() raised StopIteration
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

RECORD_BYTES = 194
WORKERS = 2
SHUFFLE_RECORDS = 1000  # of libraries that shuffle records, beside the files

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # d: (n, RECORD_BYTES); s: (n,)


@dataclass(frozen=True)
class Task:
    """What a training is to do. ``folder`` is its own, for the log, saved positions and caches."""

    shards: list[str]
    folder: str
    batch_size: int
    step_s: float
    """A training step: how long to sleep after each batch."""
    skip: bool = False
    """Leave damaged records out by the library's own means, and ask for the next batch after an error."""
    timeout_s: float = 5.0
    """For libraries with an option for how long to wait for a worker."""
    save_steps: int | None = None
    """Save the position after so many batches each, and go on from a saved one; None: do not."""
    service: str = ""
    """Address of the dispatcher of a service that runs apart."""

    @property
    def log(self) -> Path:
        return Path(self.folder, "log.jsonl")


class Epoch(Protocol):
    """``saved``: a path that :meth:`save` wrote, to go on from. Raises what the library raises."""

    def __init__(self, task: Task, saved: Path | None) -> None: ...
    def __next__(self) -> Batch: ...
    def save(self, path: Path) -> None: ...
    def close(self) -> str:
        """Ends what was started. What the library keeps of the damage that it met, as text."""


def keys_of(d: npt.NDArray[np.uint8], s: npt.NDArray[np.int64]) -> list[int]:
    """Of each record, its number (the first four bytes of ``d``) and a checksum of all of its values."""
    numbers = np.ascontiguousarray(d[:, :4]).view(">u4")[:, 0].tolist()
    rows = zip(numbers, d, s.astype("<i8"), strict=True)
    return [number << 32 | zlib.crc32(score.tobytes(), zlib.crc32(data.tobytes())) for number, data, score in rows]


def stack(records: list[dict[str, Any]]) -> Batch:
    """A batch of records that a library for TFRecords parsed one by one, ``d`` as bytes or as an array of bytes."""
    return (
        np.stack([np.frombuffer(bytes(record["d"]), np.uint8) for record in records]),
        np.array([int(np.ravel(record["s"])[0]) for record in records], np.int64),
    )
