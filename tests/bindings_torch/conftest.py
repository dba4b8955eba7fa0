"""Programs of several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_PRELUDE = """
import json, os, sys

folder, rank = sys.argv[1], int(os.environ["RANK"])


def report(found):
    with open(f"{folder}/report-{rank}.json", "w") as file:
        json.dump(found, file)


"""
_LIMIT_S = 200.0  # imports of these frameworks take 20 s of CPU time


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[str, int], list[Any]]:
    """Runs a program in so many processes, which torchrun starts; returns what each of them gave to ``report``.

    The program knows the ``folder`` of the test, and its ``rank``. It must succeed.
    """

    def run(program: str, num_processes: int) -> list[Any]:
        path = tmp_path / "program.py"
        path.write_text(_PRELUDE + program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_processes}", str(path), str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            printed = process.communicate(timeout=_LIMIT_S)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, printed
        return [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(num_processes)]

    return run
