"""The comparison from end to end: real candidates on a tiny set, and candidates that are wrong on purpose."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from loaderd.bench.compare import take_turns
from loaderd.bench.run_candidate import CandidateError

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = [
    *("--records", "6000", "--num-shards", "4", "--batch-size", "128"),
    *("--seconds", "0.2", "--examples", "2000", "--warmup-seconds", "0.1", "--attempts", "1"),
]

# Candidates for a copy of bench/: what they deliver is made, not read. CHANGE spoils it.
_MADE = """
import os, subprocess, sys, time
import numpy as np
from loaderd.bench.compare import CHECK_RECORDS, CHECK_SHARDS
from loaderd.bench.interface import Step
from loaderd.bench.reference import decode
from loaderd.bench.synthetic import shard_records

def steps(config):
    while True:
        for shard in range(CHECK_SHARDS):
            for records in shard_records(shard, CHECK_RECORDS, CHECK_SHARDS, seed=0):
                board, flags, score = decode(*records)
                CHANGE
                yield Step(len(score), (board, flags, score))
        if config.epochs == 1:
            return
"""
_SPOILED = {
    "honest": "pass",
    "one_bit": "board[5, 3, 3, 7] = 1.0 - abs(board[5, 3, 3, 7])",
    "short": "board, flags, score = board[1:], flags[1:], score[1:]",
    "broken": "raise RuntimeError('the pipeline burst')",
    "stuck": "time.sleep(600)",
}


def _compare(bench: Path, tmp_path: Path, candidates: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(bench / "compare.py"), *TINY, "--candidates", candidates, *more]
    places = ["--work-dir", str(tmp_path / "work"), "--results-dir", str(tmp_path / "results"), "--name", "x"]
    return subprocess.run([*command, *places], capture_output=True, text=True, timeout=110)


def _runs(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "results" / "x.jsonl").read_text().splitlines()]


def _copy_with_spoiled(tmp_path: Path) -> Path:
    bench = tmp_path / "bench"
    shutil.copytree(BENCH, bench, ignore=shutil.ignore_patterns("results", "__pycache__"))
    for name, change in _SPOILED.items():
        (bench / "candidates" / f"{name}.py").write_text(_MADE.replace("CHANGE", change))
    return bench


def test_all_kinds_of_candidates_agree_and_are_timed(tmp_path: Path) -> None:
    specs = "floor tfdata_tuned tfdata_expert tfdata_xla:noshuffle,graph loaderd_python loaderd_tfdata"
    done = _compare(BENCH, tmp_path, specs, "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = _runs(tmp_path)
    assert [run["candidate"] for run in runs] == specs.split()
    for run in runs:
        assert run["examples"] >= 2000 and run["seconds"] >= 0.2
        assert run["examples_per_s"] == run["examples"] / run["seconds"]
        assert run["total_cpu_s"] >= run["consumer_cpu_s"] - 0.05 and run["consumer_cpu_s"] > 0
    by_name = {run["candidate"]: run for run in runs}
    assert by_name["tfdata_tuned"]["peak_pss_bytes"] > 100 << 20
    assert "tensorflow" in by_name["tfdata_tuned"]["versions"]
    # loaderd's work is done by its descendants: what its consumer spends is the lesser part of the whole.
    python = by_name["loaderd_python"]
    assert python["total_cpu_s"] > 1.5 * python["consumer_cpu_s"]
    assert "tensorflow" not in python["versions"]
    page = (tmp_path / "results" / "x.md").read_text()
    assert all(f"| {spec} |" in page for spec in specs.split())
    assert "- machine: " in page and "- command: `python bench/compare.py " in page


def test_candidates_take_turns_and_each_round_starts_with_another(tmp_path: Path) -> None:
    done = _compare(_copy_with_spoiled(tmp_path), tmp_path, "floor honest", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(run["round"], run["candidate"]) for run in _runs(tmp_path)] == [
        (0, "floor"),
        (0, "honest"),
        (1, "honest"),
        (1, "floor"),
    ]


def test_a_disturbed_run_is_taken_again_whatever_its_speed() -> None:
    others = {"a": iter([0.9, 0.0, 0.0]), "b": iter([0.5, 0.6, 0.7, 0.0])}
    speeds = {"a": iter([900.0, 100.0, 200.0]), "b": iter([1.0, 2.0, 3.0, 4.0])}
    logged: list[dict[str, Any]] = []

    def measure(spec: str) -> dict[str, Any]:
        return {"candidate": spec, "other_cores": next(others[spec]), "examples_per_s": next(speeds[spec])}

    runs, failures = take_turns(["a", "b"], 2, 3, measure, logged.append)
    assert not failures
    kept = [(run["round"], run["candidate"], run["attempt"], run["examples_per_s"]) for run in runs]
    assert kept == [(0, "a", 1, 100.0), (0, "b", 2, 3.0), (1, "b", 0, 4.0), (1, "a", 0, 200.0)]
    assert len(logged) == 7


def test_a_candidate_that_fails_in_the_middle_is_left_out_from_then_on() -> None:
    def measure(spec: str) -> dict[str, Any]:
        if spec == "a" and len(logged) == 3:
            raise CandidateError("a: ended")
        return {"candidate": spec, "other_cores": 0.0}

    logged: list[dict[str, Any]] = []
    runs, failures = take_turns(["a", "b"], 3, 3, measure, logged.append)
    assert failures == {"a": "a: ended"}
    assert [(run["round"], run["candidate"]) for run in runs] == [(0, "a"), (0, "b"), (1, "b"), (2, "b")]


def test_wrong_broken_and_stuck_candidates_are_named_and_left_out(tmp_path: Path) -> None:
    bench = _copy_with_spoiled(tmp_path)
    done = _compare(bench, tmp_path, "honest one_bit short broken stuck", "--rounds", "1", "--timeout", "8")
    assert done.returncode == 1
    assert [run["candidate"] for run in _runs(tmp_path)] == ["honest"]
    shown = " ".join(done.stdout.split())
    assert "one_bit: delivered {'rows': 20011," in shown
    assert "short: delivered {'rows': 20008," in shown
    assert "broken: ended with status 1" in shown and "the pipeline burst" in shown
    assert "stuck: not done after 8 s" in shown


def test_an_unknown_option_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = _compare(BENCH, tmp_path, "floor:sideways", "--rounds", "1")
    assert done.returncode == 1 and "option must be one of ['graph', 'noshuffle']" in done.stderr
