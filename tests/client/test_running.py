"""Which loaders run, as another process sees them: while one starts, and while one ends."""

from __future__ import annotations

import os
import subprocess
import sys

from loaderd.client.running import running_streams
from loaderd.memory.samples import PAGE_NAME

# A daemon that has its page, and has not given it a size yet; then one that has not written to it yet.
_STARTING = f"""
import os, sys
from loaderd.protocol.process import name_process
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
