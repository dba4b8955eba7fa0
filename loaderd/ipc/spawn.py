"""Starting a process of loaderd's, which ends when the process that started it does.

A child is a fresh interpreter with its end of a socket pair. It is not forked (TensorFlow's threads would be missing
there, and what they hold would stay locked) and not spawned by ``multiprocessing`` (that would run the user's main
script, and import TensorFlow, once more). Workers are forks of a process that has no such threads
(``daemon.pool.fork_server``).
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading

from loaderd.errors import DaemonError
from loaderd.ipc.descriptors import above_standard, is_open, socket_above_standard
from loaderd.machine import remedy

# The child imports from where its parent does, whatever folder it starts in. ``python -c`` begins with a ``sys.path``
# that has the working directory first, in which anybody may have left a module. So before it is set, only modules are
# imported that are part of the interpreter. What is imported then stays for good: the garbage collector need not look
# at it, neither meanwhile nor later. It runs more rarely than by default, as lists of many shards took it long: with
# 50,000, a fifth of the time until the first batch. ``enter_process`` takes its own arguments.
_BOOT = (
    "import gc,marshal,sys;gc.disable()\n"
    "with open(int(sys.argv[4]),'rb') as file:sys.path[:],sys.argv[4:]=marshal.load(file)\n"
    "import importlib;module=importlib.import_module(sys.argv[1]);gc.freeze()\n"
    "gc.set_threshold(10_000,10,20);gc.enable();module.main()"
)

_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC)

# A worker computes in one thread, and sees no GPU: a module that imports TensorFlow must not take a GPU's memory.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


# Held while a process is started. A fork that another thread made meanwhile would have the child's end of the socket,
# and the pipe by which Popen learns that the child runs: both would be open as long as that fork lives.
_starting = threading.RLock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_process(module: str, path: list[str] | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run ``main()`` of ``module`` in a new process; returns the process, and our end of the socket to it.

    ``path``: its ``sys.path``; None: :func:`search_path`. Raises DaemonError if the process cannot be started.
    """
    with _starting:
        try:
            ours, theirs = map(socket_above_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            with theirs:
                try:
                    return _run(module, theirs, search_path() if path is None else path), ours
                except BaseException:
                    ours.close()
                    raise
        except OSError as error:
            raise not_started(module, error) from None


def _run(module: str, sock: socket.socket, path: list[str]) -> subprocess.Popen[bytes]:
    """The process. Raises OSError."""
    # Where we have none open, it gets /dev/null: else its output would go into the file that it opens next.
    stdout, stderr = (None if is_open(fd) else subprocess.DEVNULL for fd in (1, 2))
    arguments = above_standard(os.memfd_create("loaderd-arguments"))  # those of a command line may be too long
    try:
        given = marshal.dumps([path, [text for text in sys.argv if isinstance(text, str)]])
        os.pwrite(arguments, given, 0)  # the child reads on from where we are
        own = [module, str(sock.fileno()), str(os.getpid()), str(arguments)]
        return subprocess.Popen(
            # Flags such as -I: else it may be another Python than this one, or have other names for files.
            [sys.executable or "", *subprocess._args_from_interpreter_flags(), "-c", _BOOT, *own],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[sock.fileno(), arguments],
            # A session of its own: Ctrl-C on the terminal is the training process's business.
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT},
        )
    finally:
        os.close(arguments)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what ``start_process`` has started, and what that has started, if nobody has waited for it yet.

    When a process of ours dies, its children do, too, as soon as they have asked Linux for it. A worker that is
    stopped before it has, and a program that a user's function has started, would be left.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. Nobody has waited for it then, as after ``poll``: ``kill_group`` can still be called."""
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def search_path() -> list[str]:
    """``sys.path`` without relative entries: a child that starts in another folder, or later, finds the same modules.

    Where an entry was when something was first imported from it, as the import system knows it; else where it is.
    """
    here = _working_directory()
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # the import system skips others, too
    known = [getattr(sys.path_importer_cache.get(entry), "path", entry) if entry else here for entry in entries]
    return [os.path.join(here, entry) if entry and here else entry for entry in known]


def _working_directory() -> str:
    """The working directory; "" if it is deleted, so that nothing can be imported from there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def not_started(module: str, error: OSError) -> DaemonError:
    if error.errno in _NOT_A_PROGRAM and error.filename != os.devnull:
        return DaemonError(
            f"cannot start a process for {module}: sys.executable must be a Python that can be run, "
            f"got {sys.executable!r}: {error.strerror}"
        )
    where = f"{error.filename}: " if error.filename else ""
    return DaemonError(f"cannot start a process for {module}: {where}{error.strerror}", hint=remedy(error))
