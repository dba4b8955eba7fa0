"""The examples of an NNUE and of shogi, as a user runs them: boards are written, and a small network learns."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: object, status: int = 0) -> str:
    """What it prints."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_network_learns_of_boards_in_bulletformat(tmp_path: Path):
    printed = run("nnue/make_shards.py", "--out", tmp_path / "boards", "--boards", 20_000)
    assert "train: 20,000 boards, 640,000 bytes" in printed and "validation: 400 boards" in printed
    assert "holds boards already" in run("nnue/make_shards.py", "--out", tmp_path / "boards", status=1)
    sizes = ["--hidden", 8, "--batch-size", 200, "--epochs", 3, "--workers", 1, "--device", "cpu"]
    printed = run("nnue/train.py", "--data", tmp_path / "boards", "--out", tmp_path / "run", *sizes)
    before, after = map(float, re.findall(r"(?:before|after): ([\d.]+)", printed))
    assert after < 0.9 * before
    assert re.search(r"^the loader alone: [\d,]+ positions/s; training: [\d,]+ positions/s$", printed, re.MULTILINE)
    assert re.search(r"^[\d.]+% of a step went into waiting for a batch$", printed, re.MULTILINE)
    assert (tmp_path / "run/net.pt").stat().st_size > 0


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_network_learns_of_shogi_positions(tmp_path: Path):
    printed = run("shogi/make_shards.py", "--out", tmp_path / "positions", "--positions", 4_000)
    assert "train: 4,000 positions, 152,000 bytes" in printed and "validation: 200 positions" in printed
    assert "holds positions already" in run("shogi/make_shards.py", "--out", tmp_path / "positions", status=1)
    sizes = ["--channels", 8, "--blocks", 1, "--batch-size", 100, "--epochs", 2, "--workers", 1, "--device", "cpu"]
    printed = run("shogi/train.py", "--data", tmp_path / "positions", "--out", tmp_path / "run", *sizes)
    before, after = map(float, re.findall(r"^validation (?:before|after): +policy ([\d.]+)", printed, re.MULTILINE))
    assert after < 0.9 * before
    assert re.search(r"^[\d.]+% of a step went into waiting for a batch$", printed, re.MULTILINE)
    assert (tmp_path / "run/net.pt").stat().st_size > 0
