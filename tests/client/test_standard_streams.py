"""Programs without a standard error, output or input, as services may be, or without a working directory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.numbered import Numbered

_HEAD = """
import json, os, signal, socket, sys
from pathlib import Path

import loaderd

shards, out, progress = json.loads(sys.argv[1])
schema = loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {"id": loaderd.Array("id")})

def children():
    own = os.getpid()
    return [int(pid) for task in os.listdir("/proc/self/task")
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split()]

def standard(pid):
    found = {fd: f"/proc/{pid}/fd/{fd}" for fd in range(3)}
    return {fd: os.readlink(path) for fd, path in found.items() if os.path.lexists(path)}
"""
_BODY = """
before = [fd for fd in range(3) if Path(f"/proc/self/fd/{fd}").exists()]
with loaderd.Loader(shards, schema, batch_size=50, workers=2, index_cache="none", progress=progress) as loader:
    count = sum(batch.num_records for batch in loader)
    (daemon,) = children()
    seen = [standard(os.getpid()), standard(daemon)]
    os.kill(daemon, signal.SIGKILL)  # which is told by a warning
    count += sum(batch.num_records for batch in loader)
    restarts = loader.statistics().daemon_restarts
Path(out).write_text(json.dumps([before, count, restarts, seen]))
"""


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("closed", "progress"),
    [
        *(([0, 1, 2], None), ([0], None), ([2], None), ([1, 2], None)),
        *(([0, 1, 2], True), ([0], True), ([2], True), ([1, 2], True)),
    ],
)
def test_without_standard_streams(numbered: Numbered, tmp_path: Path, closed: list[int], progress: bool | None):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(textwrap.dedent(_HEAD + _BODY))
    arguments = json.dumps([[str(path) for path in numbered.write([100, 50])], str(out), progress])
    closing = " ".join(("<&-", ">&-", "2>&-")[fd] for fd in closed)
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, str(script), arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    before, count, restarts, (own, daemons) = json.loads(out.read_text())
    assert before == [fd for fd in range(3) if fd not in closed]
    assert (count, restarts) == (300, 1)
    assert not [path for fd, path in own.items() if int(fd) in closed and path != "/dev/null"], (
        "TensorFlow writes there"
    )
    assert len(daemons) == 3 and not [path for path in daemons.values() if "socket" in path or "memfd" in path]
    assert all(daemons[str(fd)] == "/dev/null" for fd in closed)


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr = None", "os.dup2(os.open(out, os.O_CREAT), 2)"])
def test_a_standard_error_that_cannot_be_written_to(numbered: Numbered, tmp_path: Path, how: str):
    """A bar that was asked for is left out."""
    code = textwrap.dedent(_HEAD) + f"\n{how}\n" + textwrap.dedent(_BODY)
    out = tmp_path / "out.json"
    arguments = json.dumps([[str(path) for path in numbered.write([100, 50])], str(out), True])
    done = subprocess.run([sys.executable, "-c", code, arguments], stdout=subprocess.DEVNULL, timeout=60)
    assert done.returncode in (0, 120), "120: Python cannot flush it, at the very end"
    assert json.loads(out.read_text())[1:3] == [300, 1]
