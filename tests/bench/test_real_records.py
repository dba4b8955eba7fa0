"""The readers of Leela's and KataGo's files, loaderd and the communities' own: all deliver the same records."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import real_records

from loaderd.schemas.kata import rows
from loaderd.schemas.leela import RECORD


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three games of made-up positions."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("lc0") / "games.tar"
    with tarfile.open(path, "w") as tar:
        for game, count in enumerate((70, 41, 300)):
            records = np.zeros(count, RECORD)
            records["version"], records["input_format"] = 6, 1
            records["probabilities"] = rng.random((count, 1858), np.float32)
            records["planes"] = rng.integers(0, 1 << 63, (count, 104), np.uint64)
            for name, most in (("castling", 1), ("side_to_move", 1), ("rule50_count", 99)):
                records[name] = rng.integers(0, most + 1, records[name].shape)
            for name in ("result_q", "best_q", "orig_q", "plies_left", "policy_kld"):
                records[name] = rng.random(count)
            data = gzip.compress(records.tobytes(), 1)
            info = tarfile.TarInfo(f"games/{game}.gz")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of any bytes, more than two batches of the check; floats are such."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, 256, (150, rows().itemsize), np.uint8).view(rows()).reshape(-1)
    for name in ("globalInputNC", "globalTargetsNC"):
        found[name] = rng.random(found[name].shape)
    found["binaryInputNCHWPacked"][..., -1] &= 128  # the padding
    path = tmp_path_factory.mktemp("katago") / "rows.npz"
    np.savez_compressed(path, **{name: found[name] for name in rows().names or ()})
    return str(path)


@pytest.mark.slow
def test_the_script_prints_a_line_a_run_and_ratios(tar: str, npz: str):
    command = [sys.executable, real_records.__file__, "--lc0-tars", tar, "--katago-npz", npz]
    command += ["--rounds", "1", "--seconds", "0.2", "--window-records", "100", "--batch-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("readers deliver the same") == 2
    lines = done.stdout.splitlines()
    runs = [json.loads(line) for line in lines if line.startswith("{")]
    assert [run["candidate"] for run in runs] == [
        "lczero_chunkparser",
        "loaderd_python",
        "katago_npz",
        "loaderd_python",
        "loaderd_python",
    ]
    assert all(run["examples_per_s"] > 0 and run["peak_pss_bytes"] > 0 for run in runs)
    assert sum("(1.00 times)" in line for line in lines) >= 2  # another one may be as fast as the first
