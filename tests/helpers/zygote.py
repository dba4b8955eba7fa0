"""Programs run as a user runs them, in processes of their own: fresh ones, or forks of one that has TensorFlow.

::

    test ──JSON, descriptors──► zygote: has imported TensorFlow ──fork──► child: runs the script, ends as Python ends
         ◄──────── its pid, then its status and the time ───────┘

Importing TensorFlow takes three seconds of CPU; a fork of a process that has done so takes 20 ms. The zygote imports
and does nothing else: no operation, no list of devices, no thread, so that a child can use TensorFlow as if it had
imported it itself. A child runs the script as ``__main__`` in a session of its own, with an empty stdin, and leaves
by the interpreter's own way: uncaught exceptions, ``sys.exit``, atexit and the end of modules are what they are in
``python script.py``.

Two things differ from a fresh process. What was imported before the fork is hidden from the collector (``freeze``),
for a full collection of TensorFlow's modules is most of the second that every program with TensorFlow takes to end;
what the script makes is collected as ever. And /proc/PID/environ of the child is the zygote's; of what it starts it
is right. Where either matters, or how the interpreter starts, use :func:`start_fresh`.

A zygote runs one program at a time::

    with Zygote() as zygote:
        ended = zygote.start(script).wait(30)
        assert ended.status == 0, ended.stderr
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY = b"ready"
_MESSAGE_BYTES = 1 << 16
_IMPORT_LIMIT_S = 120.0
_KILL_LIMIT_S = 60.0
_PIPE_LIMIT_S = 30.0  # by then after the end of a program, its pipes must be closed, however busy the machine

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "1",  # without what TensorFlow says of the machine; with its warnings and errors
    "TF_ENABLE_ONEDNN_OPTS": "0",  # or TensorFlow prints a remark on rounding
    "OPENBLAS_NUM_THREADS": "1",  # or numpy starts threads when it is imported, and a fork has none of them
}


@contextlib.contextmanager
def without_what_keras_imports() -> Iterator[None]:
    """Keras imports these where they are installed, for wrappers and plots: two of TensorFlow's seven seconds."""
    hidden = {name: None for name in ("sklearn", "matplotlib") if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type] # None is what the import system has for "not to be found"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@dataclass(frozen=True)
class Ended:
    """A program that is over."""

    status: int
    """Its exit status, or minus the number of the signal that ended it, as ``subprocess`` has it."""
    stdout: str
    stderr: str
    time_s: float
    """``time.monotonic()`` when it was found to have ended."""
    hung: bool
    """Whether it had to be killed, at the limit."""
    holds_pipes: bool
    """Whether something that it left still had its standard output or error open half a minute later."""


class Program:
    """A program that runs: the leader of a session, and of a process group."""

    def __init__(self, pid: int, pipes: Sequence[int], end: Any, status: Callable[[], tuple[int, float]]) -> None:
        """``end``: what can be read when the program is over; then ``status()`` says how it ended, and when."""
        self.pid = pid
        self._end = end
        self._status = status
        self._readers = [_Reader(pipe) for pipe in pipes]

    def send(self, number: int) -> None:
        """Send a signal to the program and the rest of its process group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def is_over(self, limit_s: float = 0.0) -> bool:
        """Whether it has ended, or does so within ``limit_s``."""
        return bool(select.select([self._end], [], [], limit_s)[0])

    def wait(self, limit_s: float, examine: Callable[[int], None] | None = None) -> Ended:
        """Until it is over. At the limit it is killed, after ``examine(pid)`` has had a look at it."""
        hung = not self.is_over(limit_s)
        if hung:
            if examine is not None:
                examine(self.pid)
            self.send(signal.SIGKILL)
            assert self.is_over(_KILL_LIMIT_S), f"process {self.pid} cannot be killed"
        status, time_s = self._status()
        until_s = time.monotonic() + _PIPE_LIMIT_S
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))
        stdout, stderr = (reader.text for reader in self._readers)
        return Ended(status, stdout, stderr, time_s, hung, any(reader.is_alive() for reader in self._readers))


class _Reader(threading.Thread):
    """Reads a pipe until nobody has its other end."""

    def __init__(self, pipe: int) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._read = bytearray()
        self.start()

    def run(self) -> None:
        with open(self._pipe, "rb", buffering=0) as file:
            while data := file.read(65536):
                self._read += data

    @property
    def text(self) -> str:
        """So far."""
        return bytes(self._read).decode(errors="replace")


def start_fresh(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: bytes = b"",
) -> Program:
    """A program in a fresh process; ``stdin``, at most what a pipe holds, is what it can read."""
    source, sink = os.pipe()
    os.write(sink, stdin)
    os.close(sink)
    process = subprocess.Popen(
        command,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **QUIET, **(environment or {})},
        cwd=folder,
        start_new_session=True,
    )
    os.close(source)
    assert process.stdout is not None and process.stderr is not None
    handle = os.pidfd_open(process.pid)

    def status() -> tuple[int, float]:
        time_s = time.monotonic()
        os.close(handle)
        return process.wait(), time_s

    return Program(process.pid, [os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())], handle, status)


def start_ready(
    code: str, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs ``code``, and our end of a socket to it, when it has sent ``"ready"``.

    Its last argument is the number of its end. ``environment``: beside ours. Raises RuntimeError if it ends before.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [python, "-c", code, *arguments, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for the tests
        )
    ours.settimeout(_IMPORT_LIMIT_S)
    if ours.recv(_MESSAGE_BYTES) != READY:
        raise RuntimeError(f"a process with the arguments {arguments} did not get ready")
    return process, ours


# "exec" alone refers to the names of the script while it runs.
_BOOT = (
    "import sys; sys.path[0] = sys.argv[1]; from tests.helpers import zygote;"
    "exec(*zygote.serve(int(sys.argv[-1]), sys.argv[2] == '1', sys.argv[3:-1]))"
)


class Zygote:
    """A process that has imported ``modules``, and of which programs are forks. Raises RuntimeError if it cannot.

    ``environment``: beside ours; TensorFlow reads it when it is imported. ``freeze``: see the module's docstring.
    """

    def __init__(
        self,
        *modules: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        freeze: bool = True,
    ) -> None:
        modules = modules or ("tensorflow", "keras")
        arguments = (str(Path(__file__).parents[2]), str(int(freeze)), *modules)
        environment = {**QUIET, **(environment or {})}
        self._process, self._socket = start_ready(_BOOT, *arguments, python=python, environment=environment)

    def start(
        self,
        script: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Program:
        """Run a script in a fork; ``environment``: beside the zygote's; ``folder``: its working directory."""
        request = {
            "script": str(script),
            "arguments": arguments,
            "environment": dict(environment or {}),
            "folder": str(folder or script.parent),
        }
        pipes = [os.pipe() for _ in range(2)]
        socket.send_fds(self._socket, [json.dumps(request).encode()], [sink for _, sink in pipes])
        for _, sink in pipes:
            os.close(sink)
        pid = self._receive()

        def status() -> tuple[int, float]:
            code, time_s = self._receive()
            return code, time_s

        return Program(pid, [source for source, _ in pipes], self._socket, status)

    def _receive(self) -> Any:
        message = self._socket.recv(_MESSAGE_BYTES)
        return json.loads(message) if message else None

    def close(self) -> None:
        """End it, and a program that runs."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------- in the zygote


def _fork_for_requests(sock: socket.socket) -> dict[str, Any]:
    """Returns in the children alone, each with its request."""
    while True:
        message, pipes, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)  # the test is over
        request: dict[str, Any] = json.loads(message)
        pid = os.fork()
        if pid == 0:
            sock.close()
            os.setsid()
            for number, pipe in enumerate(pipes, start=1):
                os.dup2(pipe, number)
                os.close(pipe)
            return request
        for pipe in pipes:
            os.close(pipe)
        sock.send(json.dumps(pid).encode())
        handle = os.pidfd_open(pid)
        if sock in select.select([handle, sock], [], [])[0]:  # nothing is sent meanwhile, so this is its end
            os.killpg(pid, signal.SIGKILL)
        os.close(handle)
        _, code = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            sock.send(json.dumps([os.waitstatus_to_exitcode(code), time.monotonic()]).encode())


def serve(descriptor: int, freeze: bool, modules: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """What the zygote does; returns in its children alone, with the script and the names that it runs in.

    These are of a module made after the fork, and nobody else holds them: so they are cleared as ever at the end.
    """
    gc.disable()  # or a quarter of TensorFlow's import is to look for garbage
    with without_what_keras_imports():
        for name in modules:
            importlib.import_module(name)
    gc.enable()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    sys.modules["zygote's __main__"] = sys.modules["__main__"]
    if freeze:
        gc.collect()
        gc.freeze()
    sock.send(READY)
    request = _fork_for_requests(sock)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    script = request["script"]
    sys.argv = [script, *request["arguments"]]
    python_path = request["environment"].get("PYTHONPATH", "").split(":")
    sys.path[0:1] = [os.path.dirname(script), *(path for path in python_path if path and path not in sys.path)]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.excepthook = _print_without_ours
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    return compile(Path(script).read_text(), script, "exec"), main.__dict__


def _print_without_ours(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """The traceback begins in the script, as ever."""
    rest = traceback and traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(rest), rest)
