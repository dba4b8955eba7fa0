"""Daemons that tests start, as forks of a process that has imported what they run: that saves CPU time.

::

    the tests' process ──what start_process gives to Popen──► stem: has imported one module ──clone──► child: main()
                       ◄────────────── its pid ─────────────┘

A fresh interpreter that imports numpy and loaderd is most of a daemon's start, and the same each time: 0.15 s. From
``main()`` on a child is what it is for a user: a process of its own, whose parent is the tests' process
(CLONE_PARENT), with the environment, the folder, the descriptors and the limits that it would have, and no thread and
no module but its own.

Only the tests' process starts its children so. Programs that tests run, servers of the command line, and their
children are fresh processes; and so are all with ``pytest --fresh-processes``, as in ``make torture``.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

_MODULES = ("loaderd.daemon.private_daemon", "loaderd.daemon.server_daemon")  # the gateway's imports start threads
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x00008000
_LIMITS = [value for name, value in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]
_OF_THE_INTERPRETER = ("PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL")  # it reads them when it starts
_MESSAGE_BYTES = 1 << 18
_ABOVE = 500  # a child's descriptors lie here until each gets its number
_BOOT = "import sys; sys.path[0] = sys.argv[1]; import forked_starts; forked_starts.serve(int(sys.argv[2])).main()"


def fork_from_now_on(patch: pytest.MonkeyPatch) -> None:
    """In this process, until the patch is undone."""
    if _CLONE is not None:
        _stem_of(_MODULES[0])  # before a test counts the children of this process
        popen = functools.partial(_start, os.getpid())
        found = types.SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
        patch.setattr("loaderd.protocol.starting.subprocess", found)


def _start(owner: int, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """``start_process`` calls it in the place of Popen."""
    python, _, _, module, *_ = command
    is_ours = os.getpid() == owner and python == sys.executable and module in _MODULES
    reads_at_start = [options["env"].get(name) == os.environ.get(name) for name in _OF_THE_INTERPRETER]
    return (_Fork if is_ours and all(reads_at_start) else subprocess.Popen)(command, **options)


class _Fork(subprocess.Popen[bytes]):
    """All but the start is Popen's."""

    def _execute_child(self, command: list[str], *arguments: Any) -> None:
        pass_fds, env = arguments[3], arguments[5]
        given, standard = arguments[9:15], (arguments[9], arguments[12], arguments[14])
        numbers = [0, 1, 2, *pass_fds]
        fds = [number if fd == -1 else fd for number, fd in enumerate(standard)] + [*pass_fds]
        request = {
            "argv": ["-c", *command[3:]],
            "env": env,
            "numbers": numbers,
            "cpus": [*os.sched_getaffinity(0)],
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        }
        folder = os.open(".", os.O_PATH)
        try:
            self.pid = _stem_of(command[3]).clone(json.dumps(request).encode(), [folder, *fds])
        finally:
            os.close(folder)
        self._child_created = True
        self._close_pipe_fds(*given)  # type: ignore[attr-defined]


class _Stem:
    """A process that has imported a module, and ends when its socket is closed."""

    def __init__(self, module: str) -> None:
        from loaderd.protocol import starting

        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(Path(__file__).parent), str(theirs.fileno())],
                env={**os.environ, **starting._ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket.send(module.encode())

    def clone(self, request: bytes, fds: list[int]) -> int:
        """The pid of a child of this process."""
        with self._lock:
            socket.send_fds(self._socket, [request], fds)
            return int(self._socket.recv(_MESSAGE_BYTES))


_stem_of = functools.cache(_Stem)


# ---------------------------------------------------------------------------------------------- in the stem


def serve(descriptor: int) -> types.ModuleType:
    """Returns in the children alone, as what they would be; what they run is the module's ``main``."""
    from loaderd.decode.compiled import can_compile

    sock = socket.socket(fileno=descriptor)
    gc.disable()
    module = importlib.import_module(sock.recv(_MESSAGE_BYTES).decode())
    can_compile()  # as in what each daemon's workers are forks of: they need not load the compiler once more
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread only"
    while True:
        message, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 16)
        if not message:
            os._exit(0)  # the tests are over
        pid = _clone()
        if pid == 0:
            sock.close()
            _become(json.loads(message), fds)
            gc.enable()
            return module
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def _clone() -> int:
    """As ``os.fork``, but the child is our parent's."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (api.PyOS_AfterFork_Parent if pid else api.PyOS_AfterFork_Child)()
    assert pid >= 0, "no process can be started"
    return pid


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """What exec gives to a process."""
    os.setsid()
    os.fchdir(fds[0])
    os.close(fds[0])
    high = []
    for fd in fds[1:]:
        high.append(fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE))
        os.close(fd)
    for fd, number in zip(high, request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path[:] = os.environ["LOADERD_SYS_PATH"].split("\n")
    os.sched_setaffinity(0, request["cpus"])
    for limit, values in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)
    sys.modules["__main__"] = types.ModuleType("__main__")
