"""What the server costs, on a tiny set: candidates deliver what was written, and the script says what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import server_cost as server
from harness.interface import Config
from harness.rounds import expected_digest
from harness.run_candidate import run_candidate
from harness.synthetic import write_shards


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    paths = write_shards(tmp_path_factory.mktemp("shards"), 2_000, num_shards=3)
    return Config(tuple(map(str, paths)), batch_size=128, epochs=1, workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["loaderd_served", "loaderd_http_two"])
def test_it_delivers_what_was_written(spec: str, config: Config) -> None:
    assert run_candidate(spec, config, None, timeout_s=60)["digest"] == asdict(expected_digest(config))


@pytest.mark.slow
def test_the_script_says_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, server.__file__, "--records", "4096", "--rounds", "1", "--seconds", "0.1"]
    command += ["--warmup-seconds", "0", "--attempts", "1", "--batch-size", "64", "--workers", "1"]
    command += ["--work-dir", str(tmp_path), "--results-dir", str(tmp_path), "--cases", "one", "two"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    page = (tmp_path / "server_cost.md").read_text()
    assert done.returncode == ("MISSED" in page), done.stdout + done.stderr
    runs = [json.loads(line) for line in (tmp_path / "server_cost.jsonl").read_text().splitlines()]
    assert [(run["case"], run["config"]["batch_size"]) for run in runs] == [("one", 64), ("two", 64)]
    rates, own = ([run[key] for run in runs] for key in ("examples_per_s", "consumer_cpu_us_per_batch"))
    assert page.count("round by round: ") == 1
    assert f"- two against one, round by round: {rates[1] / rates[0]:.2f} " in page
    assert f"| two | {rates[1]:,.0f} " in page
    assert f"| {own[0]:,.0f} |" in page and f"| {2 * own[1]:,.0f} |" in page
