"""The readers of Leela's and KataGo's files, loaderd and the communities' own: all deliver the same records."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import real_records
from candidates import katago_npz
from harness.interface import Config

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
def test_leelas_parser_and_loaderd_deliver_the_same(tar: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = Config((tar,), schema=real_records.LC0)
    real_records.check(real_records.lc0_readers(base, None), tar, tmp_path)
    assert "2 readers deliver the same 411 records" in capsys.readouterr().err


@pytest.mark.slow
def test_katagos_loader_and_loaderd_deliver_the_same(npz: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    readers = real_records.katago_readers(Config((npz,), schema=real_records.KATAGO), None)
    files, checked = real_records.find_katago(argparse.Namespace(katago_npz=npz, work_dir=tmp_path))
    assert files == [npz]
    real_records.check(readers[:2], checked, tmp_path)
    assert "2 readers deliver the same 128 records" in capsys.readouterr().err
    other = readers[1]._replace(config=replace(readers[1].config, packed=True))
    with pytest.raises(SystemExit, match="not the same records"):
        real_records.check([readers[0], other], checked, tmp_path)


def test_katagos_loader_passes_over_files_without_a_batch(npz: str, tmp_path: Path):
    with np.load(npz) as found:
        np.savez(tmp_path / "short.npz", **{name: found[name][:10] for name in found.files})
    short = str(tmp_path / "short.npz")
    config = Config((short, npz), batch_size=64, epochs=1, schema=real_records.KATAGO)
    assert [step.examples for step in katago_npz.steps(config)] == [64, 64]
    with pytest.raises(ValueError, match="no file has 64 rows"):
        next(katago_npz.steps(replace(config, shards=(short,), epochs=None)))
    with pytest.raises(SystemExit, match=r"short\.npz has 10 rows"):
        real_records.find_katago(argparse.Namespace(katago_npz=short, work_dir=tmp_path))


@pytest.mark.parametrize("option", ["--lc0-tars", "--katago-npz"])
def test_files_that_are_not_there_are_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["real_records.py", option, f"{tmp_path}/*"])
    with pytest.raises(SystemExit, match="2"):
        real_records.parse_arguments()
    assert f"{option} {tmp_path}/*: there is no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_prints_a_line_a_run_and_ratios(tar: str, npz: str):
    command = [sys.executable, real_records.__file__, "--lc0-tars", tar, "--katago-npz", npz]
    command += ["--rounds", "1", "--seconds", "0.2", "--window-records", "100", "--batch-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
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
