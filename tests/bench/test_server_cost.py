"""What the server costs, on a tiny set: candidates deliver what was written, and the script says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
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


_TAKING = """
import json, os, sys, time
from harness.interface import Config, load
from harness.process_tree import process_tree

stream = load(sys.argv[1]).steps(Config(**json.loads(sys.argv[2])))
examples = 0
for step in stream:
    examples += step.examples
    if examples >= 50_000:
        break
stream.close()
until_s = time.monotonic() + 30
while (left := process_tree(os.getpid())[1:]) and time.monotonic() < until_s:
    time.sleep(0.01)  # what close() has had to kill may need a moment
print(json.dumps([examples, left]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loaderd_served_twice", "loaderd_http"])
def test_no_process_is_left_when_it_is_closed(name: str, config: Config) -> None:
    job = json.dumps(asdict(replace(config, epochs=None)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _TAKING, name, job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    examples, left = json.loads(done.stdout)
    assert examples >= 50_000 and left == []


@pytest.mark.slow
def test_the_second_consumer_counts(config: Config) -> None:
    """Each of the two gets 2,000 records; what the second gets behind the last step of the first is not seen."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _TAKING, "loaderd_served_twice", json.dumps(asdict(config))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert 2_000 < json.loads(done.stdout)[0] <= 4_000


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
