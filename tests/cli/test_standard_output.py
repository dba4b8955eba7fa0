"""Standard output that cannot be written, or lacks a character: no traceback, no status that means something else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from loaderd import testing
from tests.helpers.commands import COMMAND

FULL = "standard output cannot be written: No space left on device\n"
# Some print a line at once, one leaves all to the end, and rich writes for another.
PRINTING = (
    ["top", "--once"],
    ["inspect", "shard"],
    ["inspect", "shard", "--features"],
    ["verify", "shard"],
    ["--version"],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a shard that is damaged: the status of ``loaderd verify`` is 1."""
    (path,) = testing.write_shards(tmp_path, {"number": np.arange(100)}, num_shards=1)
    testing.damage(path, record=3)
    path.rename(tmp_path / "shard")
    return tmp_path


def ended(arguments: list[str], folder: Path, output: int | IO[Any]) -> tuple[int, str]:
    """The status, and what is on standard error."""
    done = subprocess.run(
        [COMMAND, *arguments], cwd=folder, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.one_variant
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_full_disk_is_said(arguments: list[str], folder: Path):
    with open("/dev/full", "w") as full:
        assert ended(arguments, folder, full) == (2, FULL)


@pytest.mark.one_variant
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_reader_who_has_gone_ends_it_as_sigpipe_would(arguments: list[str], folder: Path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(arguments, folder, writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["verify", "shard"], 1), (["inspect", "shard"], 0), (["top", "--once"], 0)]
)
def test_without_a_standard_output_the_status_is_what_was_found(arguments: list[str], status: int, folder: Path):
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", COMMAND, *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", ">/dev/full 2>&1"])
def test_without_a_standard_error_too(closed: str, folder: Path):
    """1 would mean that there is damage."""
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", COMMAND, "verify", "nothing"]
    assert subprocess.run(shell, cwd=folder, timeout=60).returncode == 2


def test_a_conversion_takes_a_full_output_for_no_fault_of_the_new_shards(folder: Path):
    (folder / "some.py").write_text(
        "import numpy\nfrom loaderd import testing\nschema = testing.schema_of({'number': numpy.arange(1)})\n"
    )
    testing.write_shards(folder / "whole", {"number": np.arange(100)}, num_shards=1)
    command = ["convert", "whole/*", "--schema", "some:schema", "--to", "new", "--processes", "1", "--json"]
    with open("/dev/full", "w") as full:
        assert ended(command, folder, full) == (2, FULL)


@pytest.mark.slow
def test_what_the_encoding_lacks_is_escaped(start_training: Callable[..., subprocess.Popen[str]], folder: Path):
    """What rich writes, here of a long command; and a name that is no UTF-8."""

    def printed(encoding: str, *arguments: str) -> str:
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([COMMAND, *arguments], env=env, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode(encoding)

    assert "watched_training.py" in (shown := printed("latin-1", "top", "--once", str(start_training(0.1).pid)))
    assert "\\u2026" in shown
    shard = (folder / "shard").rename(folder / os.fsdecode(b"\xff\xc3\xbc"))
    assert "\\udcff\xfc" in printed("utf-8", "inspect", str(shard))
