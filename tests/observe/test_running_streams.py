"""Which loaders run, as another process sees them: while one starts, and while one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.observe.running_streams import running_streams
from loaderd.shm.page import FACTS_BYTES, NUM_SEATS, NUM_SLOTS, words_of
from loaderd.shm.samples import PAGE_NAME
from tests.helpers.own_processes import newest_daemon

# A daemon that has its page, and has not given it a size yet; then one that has not written to it yet.
_STARTING = f"""
import os, sys
from loaderd.ipc.child import name_process
name_process("loaderd-daemon")
page = os.memfd_create("loaderd-{PAGE_NAME}")
for size in (0, 1 << 20):
    os.ftruncate(page, size)
    print(size, flush=True)
    sys.stdin.readline()
"""


def test_a_stream_that_is_being_made_is_none_yet():
    with subprocess.Popen(
        [sys.executable, "-c", _STARTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starting:
        assert starting.stdin is not None and starting.stdout is not None
        for size in (0, 1 << 20):
            assert starting.stdout.readline() == f"{size}\n"
            assert running_streams(frozenset({os.getpid(), starting.pid})) == []
            starting.stdin.write("\n")
            starting.stdin.flush()


@pytest.mark.one_variant
@pytest.mark.parametrize("nonsense", [NUM_SLOTS, NUM_SEATS, FACTS_BYTES, b"\xff", b"{", b"[]", b"{}", b"7"])
@pytest.mark.parametrize("number", [-1, 1 << 62])
def test_a_page_in_which_its_consumer_wrote_nonsense_is_none(
    write_numbered: Callable[[list[int]], list[Path]],
    numbered_schema: loaderd.Schema,
    nonsense: int | bytes,
    number: int,
):
    """A word of the page's head, or the facts behind it."""
    with loaderd.Loader(write_numbered([100]), numbered_schema, batch_size=10) as loader:
        next(iter(loader))
        assert running_streams(frozenset({newest_daemon()}))
        watched = loader._stream.watched
        assert watched is not None
        page = watched.page
        if isinstance(nonsense, int):
            page.words[nonsense] = number
        else:
            start = 8 * words_of(page.num_slots, page.num_seats)
            memory = page.words.obj.reshape(-1)
            memory[start:] = np.frombuffer(nonsense.ljust(len(memory) - start), np.uint8)
        assert running_streams(frozenset({newest_daemon()})) == []
