"""No file of the working directory is run as code: it may be a shared folder, in which anybody can leave one.

Each program here runs in a folder with a module of every name that Python or a package may look for. One that is
imported from there leaves a line in a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest

from loaderd import testing
from tests.helpers.commands import COMMAND
from tests.helpers.serving import Server, wait_until

TRAP = (
    'with open({log!r}, "a") as log: log.write("{name}, imported by " + str(__import__("sys").orig_argv[:4]) + "\\n")'
)
# What is not installed in every environment is looked for in the last entry of sys.path, too.
OPTIONAL = ("chess", "isal", "jax", "llvmlite", "loaderd", "ray", "tensorflow", "torch")
MINE = """
import os
import loaderd
import beside

def doubled(values):
    return 2 * values

schema = loaderd.Schema(
    {"id": loaderd.Int64()}, {"id": loaderd.Array("id"), "twice": loaderd.Derived(doubled, ("id",), dtype="int64")}
)
train = loaderd.Dataset(os.environ["SHARDS"], schema)
"""
TRAIN = """
import sys, mine, loaderd
with loaderd.Loader(mine.train, batch_size=50, workers=2) as loader:
    print(sum(int(batch["twice"].sum()) for batch in loader))
"""
CONSUME = """
import sys, loaderd
with loaderd.connect(sys.argv[1], "train", batch_size=50) as loader:
    print(sum(int(batch["twice"].sum()) for batch in loader))
"""
TOTAL = f"{600 * 599}\n"


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all these modules. At the end of the test, none of them has been imported."""
    folder, log = tmp_path / "shared", tmp_path / "log"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *metadata.packages_distributions(), *OPTIONAL}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(TRAP.format(log=str(log), name=name))
    monkeypatch.delenv("LOADERD_KERNELS", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield folder
    assert not log.exists(), log.read_text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's own modules, and of the shards."""
    testing.write_shards(tmp_path / "shards", {"id": np.arange(600)}, num_shards=3, compression="gzip")
    monkeypatch.setenv("SHARDS", str(tmp_path / "shards" / "*"))
    for name, text in (("mine", MINE), ("beside", ""), ("train", TRAIN), ("consume", CONSUME)):
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / f"{name}.py").write_text(text)
    return tmp_path / "home"


def run(folder: Path, *command: object) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bring(home: Path, trapped: Path) -> None:
    """The user's modules are in the working directory: ``loaderd`` looks there for what is named to it.

    So it is in ``sys.path``, behind all others, and a module is found there that is nowhere else. (Where another
    folder of the name has no ``__init__.py``, Python prefers a module to it.)
    """
    for trap in trapped.glob("*.py"):
        found = PathFinder.find_spec(trap.stem)
        if found is None or found.origin is None:
            trap.unlink()
    for name in ("mine", "beside"):
        shutil.copy(home / f"{name}.py", trapped)


def test_a_training(trapped: Path, home: Path):
    assert run(trapped, sys.executable, home / "train.py") == TOTAL


def test_the_commands(trapped: Path, home: Path):
    shards = os.environ["SHARDS"]
    for command in (["verify", shards], ["index", shards], ["inspect", shards], ["top", "--once"]):
        run(trapped, COMMAND, *command)
    bring(home, trapped)
    converted = run(trapped, COMMAND, "convert", shards, "--schema", "mine:schema", "--to", "new", "--processes", 2)
    assert "600 records" in converted


@pytest.mark.slow
def test_the_commands_that_load(trapped: Path, home: Path):
    bring(home, trapped)
    schema = ["--schema", "mine:schema"]
    run(trapped, COMMAND, "doctor", os.environ["SHARDS"], *schema, "--seconds", 4)


@pytest.mark.parametrize("network", [False, True], ids=["unix", "network"])
def test_a_server_and_its_consumers(trapped: Path, home: Path, tmp_path: Path, network: bool):
    """After a reload, and after the death of each process."""
    bring(home, trapped)
    server = Server(trapped, "mine:train", "--workers", "2", network=network, unix=str(tmp_path / "x.sock"))
    try:
        address = server.address
        assert run(trapped, sys.executable, home / "consume.py", address) == TOTAL
        before = server.family()[1:]
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("reloaded")
        for pid in server.family()[1:]:
            with contextlib.suppress(ProcessLookupError):  # those before
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(set(server.family()[1:]) - set(before)))
        assert run(trapped, sys.executable, home / "consume.py", address) == TOTAL
    finally:
        server.close()
