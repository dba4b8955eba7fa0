"""A notebook's kernel, as Jupyter starts it: a cell is interrupted, the kernel is restarted, and shut down."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupyter_client
import pytest

from tests.endings.ending import BUSY_LIMIT_S, environment_of
from tests.helpers.programs import QUIET
from tests.reliability.processes import MARK, name_of, stacks_of, wait_for_none

_LIMIT_S = 120.0

FIRST = "from given import data_set, loader\nit = iter({make}())\nfirst = next(it)"
ENDLESS = "for batch in it:\n    begun = True"


class Kernel:
    """A kernel, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.said = (folder / "said").open("w+")
        self._manager = jupyter_client.KernelManager(kernel_name="python3")
        environment = {**environment_of(folder, "loader"), MARK: self.mark}
        self._manager.start_kernel(env={**os.environ, **QUIET, **environment}, stdout=self.said, stderr=self.said)
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_LIMIT_S)

    @property
    def pid(self) -> int:
        pid: int = self._manager.provisioner.pid
        return pid

    def run(self, cell: str) -> str:
        """Its status: ``ok``, or the exception's name; what it prints comes behind that."""
        printed: list[str] = []

        def listen(message: Any) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(cell, timeout=_LIMIT_S, output_hook=listen)["content"]
        return "".join([reply["ename"] if reply["status"] == "error" else "ok", *printed])

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Ask it to end, as Jupyter does, which kills it after five seconds; then start another."""
        self._end()
        self._manager.restart_kernel(now=False)
        self._connect()

    def shut_down(self) -> None:
        self._end()
        self._manager.shutdown_kernel(now=False)

    def _end(self) -> None:
        """It ends by itself when it is asked to, in time, and nothing is left."""
        pid, began_s = self.pid, time.monotonic()
        self._client.shutdown()
        left = wait_for_none(self.mark, pid, began_s + BUSY_LIMIT_S)
        assert not left, "\n".join(f"{one} ({name_of(one)}) lives:\n{stacks_of(one)}" for one in left)
        self._client.stop_channels()

    def all_said(self) -> str:
        """To the terminal, but for what Jupyter says itself."""
        self.said.seek(0)
        return "".join(line for line in self.said if not line.startswith("[IPKernelApp]"))

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self.said.close()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    found = Kernel(tmp_path)
    yield found
    found.close()


def run_interrupted(kernel: Kernel, cell: str) -> str:
    """Run a cell, and interrupt it: until it ends, for an interrupt that comes before the cell has begun is lost."""
    over = threading.Event()

    def interrupt() -> None:
        pause_s = 1.0
        while not over.wait(pause_s):
            kernel.interrupt()
            pause_s = 15.0  # for what is being interrupted

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        return kernel.run(cell)
    finally:
        over.set()
        interrupting.join()


@pytest.mark.slow
def test_a_kernel_with_a_data_set_is_interrupted_and_shut_down(kernel: Kernel):
    interrupt(kernel, "data_set")
    kernel.shut_down()
    assert kernel.all_said() == ""


@pytest.mark.slow
def test_a_kernel_with_a_loader_is_interrupted_restarted_and_shut_down(kernel: Kernel):
    """The second kernel: while it waits for data that never come; it ends while a thread waits for them."""
    interrupt(kernel, "loader")
    kernel.restart()
    assert kernel.run("it") == "NameError"
    assert kernel.run("import slow\nfrom given import loader\nit = iter(loader(records=slow.train))") == "ok"
    assert run_interrupted(kernel, "next(it)") == "KeyboardInterrupt"
    assert kernel.run("import threading\nthreading.Thread(target=next, args=[it, None], daemon=True).start()") == "ok"
    kernel.shut_down()
    assert kernel.all_said() == ""


def interrupt(kernel: Kernel, make: str) -> None:
    """The iterator goes on behind the interrupt."""
    assert kernel.run(FIRST.format(make=make)) == "ok"
    assert run_interrupted(kernel, ENDLESS) == "KeyboardInterrupt"
    assert kernel.run("assert begun; after = next(it)") == "ok"
