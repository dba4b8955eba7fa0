"""Daemons that a test's own process starts are forks of one that has imported what they run.

A daemon's start takes 0.35 s of CPU, nearly all of it imports, and the tests start a thousand::

    starting ──arguments, descriptors──► this process, which has imported the daemons' modules
                                           └─fork─► a process that ends at once
                                                      └─fork─► the daemon: does what ``python -c`` was to do
             ◄──────its number────────                         the test's process takes it over as its child

All else is as ever: it has the arguments, the environment, the folder and the descriptors that a fresh interpreter
would have; only /proc/PID/environ is that of the process in the middle. In the rooms where starts themselves are
tested, and in programs that tests run, interpreters are fresh.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import types
from typing import Any

from loaderd.ipc import spawn
from tests.helpers.zygote import READY, start_ready

_BOOT = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[1]);"
    "from tests.helpers import ready_daemons;ready_daemons.serve(int(sys.argv[2]))"
)
MODULES = ("loaderd.daemon.private_daemon", "loaderd.daemon.server_daemon")
PYTHON = sys.executable
_MESSAGE_BYTES = 1 << 17
_MOST_DESCRIPTORS = 16
_PR_SET_CHILD_SUBREAPER = 36


class ReadyDaemons:
    """The process that they are forks of. To be made, and closed, by the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process, self._socket = start_ready(_BOOT, json.dumps(sys.path))

    def subprocess(self) -> types.SimpleNamespace:
        """What ``spawn`` is to have for the module ``subprocess``."""

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            """Only how the process comes into being is another."""

            def _execute_child(popen, args: list[str], *options: Any) -> None:
                if args[:3] != [PYTHON, "-c", spawn._BOOT] or args[3] not in MODULES:
                    super()._execute_child(args, *options)  # type: ignore[misc]
                    return
                pipes = options[9:15]
                standard = [fd if pipe == -1 else pipe for fd, pipe in enumerate([pipes[0], pipes[3], pipes[5]])]
                popen.pid = self._fork(args[3:], list(options[3]), options[5], standard)
                popen._child_created = True
                popen._close_pipe_fds(*pipes)

        return types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})

    def _fork(self, arguments: list[str], fds: list[int], environment: dict[str, str], standard: list[int]) -> int:
        """The number of a new child of ours, which has our descriptors ``fds`` under the same numbers."""
        request = {"arguments": arguments, "fds": fds, "environment": environment}
        folder = os.open(".", os.O_PATH)
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [folder, *standard, *fds])
                return int(self._socket.recv(_MESSAGE_BYTES))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
                os.close(folder)

    def close(self) -> None:
        """No more daemons."""
        self._socket.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """What the process does; returns in no process."""
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    sock = socket.socket(fileno=descriptor)
    sock.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)  # the tests are over
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                sock.close()
                _become(json.loads(message), descriptors)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        sock.send(os.read(read, _MESSAGE_BYTES))
        for each in (read, write, *descriptors):
            os.close(each)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """What ``python -c`` would be, with these arguments."""
    os.setsid()
    numbers = [0, 1, 2, *request["fds"]]
    folder, *others = (fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in descriptors)
    for each in descriptors:
        os.close(each)
    os.fchdir(folder)
    os.close(folder)
    for number, each in zip(numbers, others, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["-c", *request["arguments"]]
    try:
        exec(spawn._BOOT, {"__name__": "__main__"})
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
