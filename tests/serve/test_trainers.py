"""Two trainers and a validator on one server; each of them, and each process of the server, is killed in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import loaderd
from tests.helpers.serving import MODULE, Server, handles_of, wait_ends, wait_until

TRAINER = Path(__file__).with_name("trainer.py")
RECORDS, BATCH, EPOCHS = 2000, 10, 3


class Run:
    """The processes of a training, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Server(folder, "numbered:train", "numbered:valid", "--workers", "2")
        self.server.wait_line("valid: ")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        shard = [name[-1], "2"] if name.startswith("trainer") else []
        self.processes[name] = subprocess.Popen([sys.executable, str(TRAINER), str(self.folder), name, *shard])

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_more(self, name: str, more: int = 15) -> None:
        """Until it has had some batches more, or has ended in good order."""
        before = len(self.lines(name))
        wait_until(lambda: len(self.lines(name)) >= before + more or self.processes[name].poll() == 0, 120)

    def restart(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.close()


@pytest.fixture
def run(write_numbered: Callable[[list[int]], list[Path]], tmp_path: Path) -> Any:
    write_numbered([RECORDS // 2, RECORDS // 2])
    (tmp_path / "numbered.py").write_text(MODULE)
    found = Run(tmp_path)
    yield found
    found.close()


def expected(folder: Path, rank: int) -> list[list[int]]:
    """What an embedded loader gives that rank."""
    schema = loaderd.Schema({"id": loaderd.Int64(), "bits": loaderd.PackedBits(32)}, {"id": loaderd.Array("id")})
    shards = str(folder / "shards" / "*.tfrecord")
    with loaderd.Loader(shards, schema, batch_size=BATCH, epochs=EPOCHS, shard=(rank, 2)) as loader:
        return [batch["id"].tolist() for batch in loader]


@pytest.mark.slow  # six starts of TensorFlow; what is killed in turn is killed alone elsewhere
@pytest.mark.timeout(400)
def test_everything_is_killed_in_turn(run: Run):
    for name in ("trainer0", "trainer1", "validator"):
        run.start(name)
    for name in ("trainer0", "trainer1", "validator"):
        run.wait_for_more(name, 12 if name.startswith("trainer") else 1)
    run.restart("trainer0")
    run.restart("trainer1")
    run.restart("validator")
    run.wait_for_more("trainer0")
    os.kill(run.server.daemon, signal.SIGKILL)
    run.wait_for_more("trainer1")
    worker = next(pid for pid in run.server.family() if "worker" in Path(f"/proc/{pid}/comm").read_text())
    os.kill(worker, signal.SIGKILL)
    run.wait_for_more("trainer0")
    family = handles_of(run.server.family())
    run.server.process.kill()
    wait_ends(family)
    run.server.close()
    time.sleep(0.3)
    run.server = Server(run.folder, "numbered:train", "numbered:valid", "--workers", "1")
    for name in ("trainer0", "trainer1"):
        assert run.processes[name].wait(120) == 0
    (run.folder / "stop").touch()
    assert run.processes["validator"].wait(120) == 0

    for rank in range(2):
        *steps, _ = run.lines(f"trainer{rank}")
        wanted = expected(run.folder, rank)
        assert {line["step"] for line in steps} == set(range(len(wanted)))
        assert all(line["ids"] == wanted[line["step"]] for line in steps)
        # Only a restart of the trainer itself makes it do steps again: those behind its checkpoint.
        again = [late for early, late in pairwise(steps) if late["step"] != early["step"] + 1]
        assert len(again) <= 1 and all(late["step"] % 10 == 0 for late in again)
    *rounds, end = run.lines("validator")
    assert end == {"ended": True} and len(rounds) > 2
    assert all(line["ids"] == list(range(RECORDS // 2)) for line in rounds)
