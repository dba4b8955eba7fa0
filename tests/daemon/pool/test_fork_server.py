"""The fork server, when the daemon is killed before it has read an answer, or can open no more files."""

from __future__ import annotations

import os
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


FEW_FILES = """
import os, resource, socket, time
from tests.helpers.own_processes import children_of
from loaderd.daemon.pool.fork_server import ForkServer
from loaderd.errors import DaemonError

parent = socket.socket()
forks = ForkServer(lambda sock: time.sleep(60), parent)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
next_fd = os.dup(0)
os.close(next_fd)
for free in range(4):
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + free, most))
    try:
        ours, pid, _ = forks.start()
    except DaemonError as error:
        print(error.message)
        pid = None
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    assert children_of(forks._pid) == [pid] * (free == 3)
forks.close()
"""


def test_a_worker_whose_descriptor_does_not_fit_is_ended():
    """Two are for the socket, and one is for the worker's death."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 3 * "cannot start a worker: Too many open files\n"
