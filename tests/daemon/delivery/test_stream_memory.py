"""The memory of a stream, where the machine does not let us have all of it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import loaderd
from loaderd.daemon.delivery import stream_memory
from loaderd.daemon.delivery.stream_memory import StreamMemory
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError
from loaderd.machine import Memory
from loaderd.options import StreamOptions
from loaderd.shm import anonymous
from loaderd.storage.shard_file import ShardFile


def data_of(*files: ShardFile) -> Any:
    return SimpleNamespace(files=files, num_shards=len(files), compressions=())


def failing_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, but that its call of this number, from 0, fails."""
    numbers = itertools.count()

    def maybe(*of: Any, **how: Any) -> Any:
        if next(numbers) == call:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*of, **how)

    return maybe


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        *((anonymous.os, "memfd_create", call) for call in range(4)),
        *((anonymous.mmap, "mmap", call) for call in range(4)),
        (anonymous.os, "ftruncate", 1),
        *((stream_memory.os, "open", call) for call in range(2)),
        (stream_memory, "new_bell", 0),
    ],
)
def test_a_stream_that_cannot_be_opened_leaves_no_descriptor(
    numbered_schema: loaderd.Schema, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int
):
    description = StreamDescription(loaderd.Dataset("*", numbered_schema), StreamOptions(10, workers=1))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, name, failing_at(call, getattr(module, name)))
    with pytest.raises(DaemonError, match=r"(cannot allocate \d MiB of shared|cannot share the batches') memory"):
        StreamMemory(description, data_of(), 1, 2, 100, 1, num_members=1)
    monkeypatch.undo()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_workers_need_for_open_objects_is_counted(
    numbered_schema: loaderd.Schema, monkeypatch: pytest.MonkeyPatch
):
    description = StreamDescription(loaderd.Dataset("*", numbered_schema), StreamOptions(10, workers=3))
    monkeypatch.setattr(stream_memory, "available_memory", lambda: Memory(0, "the machine"))
    for names, num_mib in (("s3://shards/{}", 264), ("/shards/{}", 120)):  # of 16,384 objects of 3 KiB, and of none
        data = data_of(*(ShardFile(names.format(number), 1, 1) for number in range(20_000)))
        with pytest.raises(DaemonError, match=rf"\b{num_mib} MiB for 3 workers"):
            StreamMemory(description, data, 1, 2, 100, 0, num_members=1)
