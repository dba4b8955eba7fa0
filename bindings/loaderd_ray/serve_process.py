"""``loaderd serve`` as a process of an actor's: started, listened to, started again, and never left behind.

::

    actor's process
    ├─ its main thread            answers Ray
    └─ thread "loaderd-serve" ──► loaderd serve ──► its processes     (each dies with its parent)
         starts it, reads its log to the end, waits for it, starts the next one

Ray kills an actor without warning, and leaves its child processes running. So the kernel is told to kill the server
when its parent ends (``PR_SET_PDEATHSIG``). For the kernel, the parent is the *thread* that started the server, not
the process. So this thread lives as long as the actor is to have a server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from loaderd.redaction import readable_line
from loaderd.restarts import RestartPolicy

_END_S = 15.0  # `loaderd serve` gives its consumers ten seconds to take note of the end
_LAST_LINES = 20
_ADDRESS = re.compile(r'loaderd\.connect\("(https?://[^"]+)"')
# The working directory, which is first in sys.path here, may be shared: no module of it is to be imported.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path)\n"
    "from loaderd.ipc.child import die_with_parent; die_with_parent(int(sys.argv.pop(1)))\n"
    "from loaderd.cli.main import main; main()"
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def _search_path() -> list[str]:
    """The actor's ``sys.path``, to which Ray has added the job's folders, but with Python's own modules in front.

    The first of these folders is the driver's working directory, which may be shared.
    """
    own = (_STANDARD_LIBRARY, os.path.join(_STANDARD_LIBRARY, "lib-dynload"))
    return sorted(filter(None, sys.path), key=lambda entry: entry not in own)


class ServerProcess:
    """Runs ``loaderd serve`` with ``arguments``, again and again until :meth:`stop`."""

    def __init__(self, arguments: Sequence[str], token: str) -> None:
        self._command = [sys.executable, "-c", _BOOT, str(os.getpid()), "serve", *arguments, "--log-format", "json"]
        self._environment = {**os.environ, "LOADERD_TOKEN": token, "PYTHONPATH": os.pathsep.join(_search_path())}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self.address: str | None = None
        """Where it listens; None while it starts."""
        self.error = ""
        """The last words of the process before this one."""
        self.restarts = 0
        self._thread = threading.Thread(target=self._keep_running, name="loaderd-serve", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process that runs now; None: there is none just now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def stop(self) -> None:
        """End the process, and return when it has ended; its consumers are told."""
        with self._lock:
            self._over.set()
            process = self._process
        if process is not None:
            process.terminate()
            self._thread.join(_END_S)
            process.kill()
        self._thread.join()

    def _keep_running(self) -> None:
        policy = RestartPolicy()
        while True:
            policy.began()
            try:
                if not self._run():
                    return
            except OSError as error:
                self.error = f"cannot start a process: {error}"
            if self._over.wait(policy.pause_s()):
                return
            self.restarts += 1

    def _run(self) -> bool:
        """Run the process until it ends; False: it was not started, because it is not wanted any more."""
        self._last.clear()
        with self._lock:
            if self._over.is_set():
                return False
            process = self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C on the terminal of a local cluster is the driver's business
            )
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._take_line(line)
        code = process.wait()
        self.address = None
        self.error = "\n".join(self._last) or f"it ended with status {code}"
        return True

    def _take_line(self, line: str) -> None:
        try:
            entry = json.loads(line)
            level, text = entry["level"], entry["text"]
        except (ValueError, TypeError, KeyError):  # a line that Python or a library wrote
            level, text = "error", readable_line(line.rstrip("\n"))
        if (match := _ADDRESS.search(text)) is not None:
            self.address = match[1]
        if level != "info":
            self._last.append(text)
        with contextlib.suppress(OSError):  # a full disk: the server does without its log
            sys.stderr.write(f"{level}: {text}\n")  # where Ray keeps what actors say
