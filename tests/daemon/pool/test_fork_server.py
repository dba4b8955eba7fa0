"""The fork server, when the daemon is killed before it has read an answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

# It uses what is private, as a daemon that is really killed takes its fork server with it some microseconds later.
SCRIPT = """
import os, socket, sys, time
from loaderd.daemon.pool import fork_server

daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    daemon.close()
    fork_server._serve(theirs)
    time.sleep(60)  # a worker

theirs.close()
ours, workers = socket.socketpair()
for answers in range(2):
    fork_server._send(daemon, ["start", sys.path], workers.fileno())
    if answers < int(sys.argv[1]):
        daemon.recv(1000)
workers.close()
daemon.close()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ours.settimeout(30)
assert ours.recv(1) == b"", "a worker lives"
"""


@pytest.mark.parametrize("read", [0, 1, 2])
def test_it_ends_with_its_workers_and_says_nothing(read: int):
    """Of two answers so many are read."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(read)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
