"""How a stream ends, and how streams end with the program.

::

    close()                    ─┐
    the loader is garbage       ├─►  marked ──► woken ──► drained ──► reaped
    the program ends           ─┘

- **Marked**: the stream is over. No daemon is started for it any more, and a thread that asks for a batch is told so.
- **Woken**: its socket is shut down, so that a thread that waits for a batch finds that out.
- **Drained**: at the end of the program, we wait until nobody asks for a batch, and every thread that Python has not
  made has left Python and sleeps. Once the interpreter finalizes, a thread that wants the GIL never gets it. Whoever
  waits for such a thread would wait for ever, as the end of a ``tf.data`` iterator does; and where TensorFlow's own
  code wants the GIL, the program is aborted ("terminate called without an active exception"). So threads of
  TensorFlow that are about to ask for a batch must first ask, be told that the program ends, and go to sleep; and so
  must a daemon thread of Python's that is in a call of TensorFlow's.
- **Reaped**: the processes are waited for, all at the same time, and killed if that takes long.

The program ends when the threads that Python waits for have ended, too (``atexit``): such a thread gets all of its
batches, even if the main thread has ended before. What other threads are told when they ask for a batch after that
depends on who made them (``ProgramEnded.for_thread``): nothing may be printed, and no training may take the end of
the program for the end of the data.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from loaderd.errors import ClosedError
from loaderd.ipc.spawn import kill_group

if TYPE_CHECKING:
    from loaderd.client.stream import Stream

_DRAIN_S = 0.8
_DRAIN_LIMIT_S = 8.0  # on a busy machine
_SCHEDULED_S = 0.05  # Linux updates the CPU time of a thread only every few milliseconds
_LOOK_EVERY_S = 0.002
_QUIET_LOOKS = 15
_QUIET_LOOKS_IN_PYTHON = 100  # while a user's function sleeps in a thread of TensorFlow's, maybe for ever
_REAP_S = 0.3


class ProgramEnded(ClosedError):
    """A batch was asked for when the program had ended."""

    def __init__(self) -> None:
        super().__init__("the program has ended, and its loaders with it", hint="Take what you need before that.")

    def for_thread(self) -> BaseException:
        """What to raise in the current thread.

        In a thread of TensorFlow's, StopIteration: an error would be printed. In a thread of Python's, SystemExit:
        the thread ends silently, as the interpreter ends daemon threads, and does not go on as if it had had all
        batches.
        """
        thread = threading.current_thread()
        if thread is threading.main_thread():
            return self
        return StopIteration() if isinstance(thread, threading._DummyThread) else SystemExit()


# Weak references, in a set that can be copied in one step while other threads add to it.
_streams: set[weakref.ref[Stream]] = set()
_program_ended = False


def end_with_program(stream: Stream) -> None:
    """Have ``stream`` end when the program does."""
    _streams.add(weakref.ref(stream, _streams.discard))


def _living_streams() -> list[Stream]:
    return [stream for ref in list(_streams) if (stream := ref()) is not None]


def program_has_ended() -> bool:
    """Whether the program has ended, so that nothing may be started any more."""
    return _program_ended


def reap(processes: Iterable[subprocess.Popen[bytes]]) -> bool:
    """Wait for the end of ``processes``, which were told to end; kill them if it takes long.

    Returns whether Ctrl-C has cut the wait short; then they are killed. A caller may ignore that where an exception
    would only be printed, and change nothing.
    """
    waiting = list(processes)
    try:
        for kill in (False, True):
            limit_s = time.monotonic() + _REAP_S
            for process in waiting:
                if kill:
                    kill_group(process)
            for process in waiting:
                _wait_for_end(process, max(0.0, limit_s - time.monotonic()))  # what hangs in the kernel ends later
            waiting = [process for process in waiting if process.returncode is None]
    except KeyboardInterrupt:
        for process in waiting:
            kill_group(process)
        return True
    return False


def _wait_for_end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """As ``process.wait``, which only looks every 50 ms, and so returns 25 ms late on average."""
    with contextlib.suppress(OSError):  # it has been waited for by another thread
        handle = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if poll.poll(limit_s * 1000):
                kill_group(process)
        finally:
            os.close(handle)
    process.poll()


def _end_all() -> None:
    global _program_ended
    _program_ended = True
    # Kept until they are reaped: a thread of TensorFlow's that drops the last reference would wait for the processes.
    kept = _living_streams()
    for stream in kept:
        stream.end(ProgramEnded)
    if not kept and not _foreign_thread_is_in_python():
        return
    with contextlib.suppress(KeyboardInterrupt):
        _drain()
    # Once more: a thread may have been making a new connection the first time.
    for stream in _living_streams():
        stream.end(ProgramEnded)
    reap([process for stream in _living_streams() for process in stream.processes()])
    for stream in _living_streams():
        with contextlib.suppress(KeyboardInterrupt):
            stream.close()


def _drain() -> None:
    """Wait until nobody asks for a batch, and no thread of TensorFlow's is in Python or about to enter it: all sleep.

    A thread that waits for the GIL sleeps, too; but it gets the GIL while we sleep, so one look is not enough. Waits
    for 0.8 s, and longer by the time in which a thread waits for a core; 8 s at most.
    """
    since_s = time.monotonic()
    until_s, last_s = since_s + _DRAIN_S, since_s + _DRAIN_LIMIT_S
    computed_ns: dict[str, int | None] = {}  # by ``since_s``
    quiet = 0
    while time.monotonic() < min(until_s, last_s):
        time.sleep(_LOOK_EVERY_S)
        running = _running_foreign_threads()
        passed_s = time.monotonic() - since_s
        if passed_s >= _SCHEDULED_S:
            if _one_lacks_a_core(computed_ns, running, passed_s):
                until_s += passed_s
            since_s, computed_ns = since_s + passed_s, running
        is_asked = any(stream.lock.locked() for stream in _living_streams())
        quiet = 0 if running or is_asked else quiet + 1
        if quiet >= (_QUIET_LOOKS_IN_PYTHON if _foreign_thread_is_in_python() else _QUIET_LOOKS):
            return


def _one_lacks_a_core(before: dict[str, int | None], now: dict[str, int | None], passed_s: float) -> bool:
    """Whether one of the threads that run ``now`` has computed for less than half of the time since ``before``.

    Both are what :func:`_running_foreign_threads` returned.
    """
    for thread, computed_ns in now.items():
        before_ns = before.get(thread)
        if computed_ns is not None and before_ns is not None and (computed_ns - before_ns) * 1e-9 < passed_s / 2:
            return True
    return False


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Without collections of garbage, while threads and their frames are looked at.

    A collection may run a ``__del__`` that ends one of these threads, as that of a DataLoader's iterator does. In
    ``threading.enumerate`` it would wait for ever for that thread, which needs the lock that is held there. In
    ``frame.f_back``, which in Python 3.11 allocates and so collects, the frame would be gone when it is read:
    SIGSEGV.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def _foreign_thread_is_in_python() -> bool:
    """Whether a thread that Python has not made is in a Python function, awake or not: it will want the GIL again."""
    ours = {threading.get_ident(), *(thread.ident for thread in _threads_of_python())}
    return not ours.issuperset(sys._current_frames())


@_without_collection()
def _running_foreign_threads() -> dict[str, int | None]:
    """The threads that run, or could, and that Python has not made, or that are in a call of TensorFlow's.

    For each the nanoseconds that it has computed; None if it waits for a disk, or Linux does not say.
    """
    try:
        threads = set(os.listdir("/proc/self/task"))
    except OSError:  # the process can open no more files: for all that we know, a thread runs
        return {"unknown": None}
    threads.discard(str(os.getpid()))  # the main thread: in a fork, Python 3.11 has the parent's native_id for it
    frames = sys._current_frames()
    for thread in _threads_of_python():
        if not _is_in_tensorflow(frames.get(thread.ident or 0)):
            threads.discard(str(thread.native_id))
    running: dict[str, int | None] = {}
    for name in threads:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/stat", "rb") as file:  # it may be gone
            # "tid (name) state …"; the name may hold anything.
            state = file.read().rpartition(b")")[2].split()[0]
            if state in (b"R", b"D"):
                running[name] = None
                if state == b"R":
                    with open(f"/proc/self/task/{name}/schedstat", "rb") as computed:
                        running[name] = int(computed.read().split()[0])
    return running


def _is_in_tensorflow(frame: FrameType | None) -> bool:
    """Whether the thread is in a call of TensorFlow's, which may run a ``tf.data`` pipeline, and Python functions."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("tensorflow."):
            return True
        frame = frame.f_back
    return False


def _threads_of_python() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


def _leave_streams_to_parent() -> None:
    for stream in _living_streams():
        stream.leave_to_parent()
    _streams.clear()


os.register_at_fork(after_in_child=_leave_streams_to_parent)
atexit.register(_end_all)
