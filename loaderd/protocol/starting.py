"""Starting a process of loaderd's, which ends when the process that started it does.

A child is a fresh interpreter with its end of a socket pair. It is not forked (TensorFlow's threads would be missing
there, and what they hold would stay locked) and not spawned by ``multiprocessing`` (that would run the user's main
script, and import TensorFlow, once more). Workers are forks of a process that has no such threads
(``daemon.pool.fork_server``).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from weakref import WeakSet

from loaderd.errors import DaemonError
from loaderd.machine import remedy
from loaderd.protocol.descriptors import is_open, socket_above_standard

_SYS_PATH = "LOADERD_SYS_PATH"

# The child imports from where its parent does, whatever folder it starts in. What it imports stays for good: the
# garbage collector need not look at it, neither meanwhile nor later.
_BOOT = (
    f"import gc,os,sys;gc.disable();sys.path[:]=os.environ[{_SYS_PATH!r}].split('\\n');"
    "import importlib;module=importlib.import_module(sys.argv[1]);gc.freeze();gc.enable();module.main()"
)

# A worker computes in one thread, and sees no GPU: a module that imports TensorFlow must not take a GPU's memory.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def start_process(module: str, output: int | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run ``main()`` of ``module`` in a new process; returns the process, and our end of the socket to it.

    ``output``: the descriptor to which its standard output and error go; None: where ours go. Raises DaemonError if
    the process cannot be started.
    """
    # Not os.pathsep: a folder's name may hold a colon. The import system, too, skips entries that are no strings.
    path = "\n".join(entry or _working_directory() for entry in sys.path if isinstance(entry, str))
    try:
        ours, theirs = map(socket_above_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        _ends_of_children.add(theirs)
    except OSError as error:
        raise not_started(module, error) from None
    # Where we have none open, it gets /dev/null: else its output would go into the file that it opens next.
    stdout, stderr = (output or (None if is_open(fd) else subprocess.DEVNULL) for fd in (1, 2))
    unbuffered = {} if output is None else {"PYTHONUNBUFFERED": "1"}  # as on a terminal: a line when it is printed
    try:
        process = subprocess.Popen(
            [sys.executable or "", "-c", _BOOT, module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            # A session of its own: Ctrl-C on the terminal is the training process's business.
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **unbuffered, _SYS_PATH: path},
        )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise not_started(module, error) from None
        raise
    finally:
        theirs.close()
    return process, ours


def _working_directory() -> str:
    """The working directory; "" if it is deleted, so that nothing can be imported from there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def not_started(module: str, error: OSError) -> DaemonError:
    """What is raised where a process that runs ``module`` cannot be started."""
    if error.filename is not None:  # from Popen: the program cannot be run
        return DaemonError(
            f"cannot start a process for {module}: sys.executable must be a Python that can be run, "
            f"got {sys.executable!r}: {error.strerror}"
        )
    return DaemonError(f"cannot start a process for {module}: {error.strerror}", hint=remedy(error))


_ends_of_children: WeakSet[socket.socket] = WeakSet()
"""The children's ends of sockets, which are open here until the child has them."""


def _leave_ends_to_parent() -> None:
    """In a fork that another thread makes, close them: else a child's death goes unnoticed while the fork lives."""
    for end in _ends_of_children:
        end.close()


os.register_at_fork(after_in_child=_leave_ends_to_parent)
