"""The scripts for a GPU, with PyTorch and JAX, on a CPU and as a user runs them: tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.feed_table import check_table

ROOT = Path(__file__).parents[2]
LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("torch", "jax")
]


def run(script: str, *arguments: object) -> str:
    """What it prints."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    run("examples/gpu/make_shards.py", "--out", folder, "--records", 2000, "--processes", 1)
    return folder


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_library_trains_on_each_feed(library: str, shards: Path) -> None:
    sizes = ["--batch-size", 64, "--seconds", 0.1, "--filters", 2, "--workers", 1, "--device", "cpu"]
    printed = run(f"examples/gpu/{library}_train.py", "--data", shards / "*" / "*.tfrecord", *sizes)
    check_table(printed, {"torch": "PyTorch", "jax": "JAX"}[library])


def options_in(folder: Path) -> list[object]:
    places = ["--work-dir", folder, "--out", folder / "x"]
    return ["--records", 3000, "--seconds", 0.1, "--device", "cpu", *places]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_benchmark_measures_each_case_and_says_what_failed(library: str, tmp_path: Path) -> None:
    ways = [f"{library}_{kind}:128:1" for kind in ("packed", "floats", "own", "kernel")]
    cases = ["numpy_read:128:1", "numpy_packed:128:1", ways[0], f"{library}_packed:128:0", *ways[1:]]
    options = options_in(tmp_path)
    printed = run("bench/gpu_packed.py", *options, "--cases", *cases)
    runs = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [one["case"] for one in runs] == cases
    assert ["error" in one for one in runs] == [case.endswith("packed:128:0") for case in cases]
    packed, floats = runs[2], runs[4]
    assert packed["first_sum"] == floats["first_sum"]
    assert {"parse", "fill", "fields", "daemon"} <= packed["ns_per_record"].keys()
    page = (tmp_path / "x.md").read_text()
    assert page.count(f"| {library}_packed ") == 1 and "| workers: fill " in page and "| unpacking alone " in page
    assert "NO GPU HERE" in page and "NO GPU HERE" in printed and f"failed: {library}_packed:128:0" in printed


def test_the_benchmark_ends_with_its_table_when_time_is_over(tmp_path: Path) -> None:
    options = options_in(tmp_path)
    cases = ["numpy_packed:128:1", "numpy_packed:256:1"]
    printed = run("bench/gpu_packed.py", *options, "--minutes", 0.0001, "--cases", *cases)
    assert "not measured, for want of time: numpy_packed:256:1" in printed
    assert "| numpy_packed | 128 | 1 | " in (tmp_path / "x.md").read_text()
