"""The accidents happen, what happened is seen as it was, and the table says it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import reliability

# Trainings of TensorFlow and of loaderd one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[tuple[str, str], dict]:
    """``reliability.py`` with small data; the runs it leaves, by library and accident."""
    brief = ["--records", "4000", "--shards", "4", "--rounds", "1", "--limit-seconds", "20", "--step-seconds", "0.05"]
    monkeypatch.setattr(sys, "argv", [reliability.__file__, *arguments, *brief, "--results-dir", str(folder)])
    reliability.main()
    lines = (folder / "reliability.jsonl").read_text().splitlines()
    return {(one["library"], one["accident"]): one for one in map(json.loads, lines)}


def test_loaderd_and_tfdata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = run(
        monkeypatch,
        tmp_path,
        *("--libraries", "loaderd", "tfdata"),
        *("--accidents", "undisturbed", "kill_worker", "flip", "flip_skip"),
    )
    for name in ("loaderd", "tfdata"):
        whole = runs[name, "undisturbed"]
        assert (whole["outcome"], whole["delivered"], whole["lost"], whole["repeated"]) == ("ends", 4000, 0, 0)
        flip = runs[name, "flip"]
        assert (flip["outcome"], flip["num_errors"], flip["altered"]) == ("error", 1, 0)
    assert runs["tfdata", "kill_worker"]["outcome"] == "no processes"
    killed, flipped, skipped = (runs["loaderd", kind] for kind in ("kill_worker", "flip", "flip_skip"))
    assert (killed["outcome"], killed["lost"], killed["repeated"], killed["same_order"]) == ("ends", 0, 0, True)
    assert flipped["names"] == ["shard", "record", "offset"] == skipped["names"]
    assert (skipped["outcome"], skipped["delivered"], skipped["lost"]) == ("ends", 3999, 0)
    others = runs["tfdata", "flip_skip"]
    assert others["lost"] == 3999 - others["delivered"] > 0, "ignore_errors leaves out the rest of the shard"
    page = (tmp_path / "reliability.md").read_text()
    assert "|  | loaderd | tf.data |" in page and "no worker processes" in page


def test_what_a_killed_training_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = run(monkeypatch, tmp_path, "--libraries", "loaderd", "--accidents", "kill_training", "resume")
    killed, resumed = (runs["loaderd", kind] for kind in ("kill_training", "resume"))
    assert set(killed["left"]) == {"2", "10"} and killed["delivered"] < 4000
    assert not any(killed["left"]["10"].values())
    assert (resumed["saved"], resumed["lost"], resumed["repeated"]) == (True, 0, 0)


def test_losses_repeats_and_changes_are_counted(tmp_path: Path):
    """By a log that is written here, of a world of ten records."""
    world = reliability.World([], list(range(10)), [], batch_size=2, step_s=0.0, limit_s=1.0)
    (tmp_path / "stderr").write_text("one\ntwo\n")
    log = [
        {"keys": [0, 1, 1]},
        {"keys": [2, 99]},
        {"error": "ValueError: x", "at_s": 1.0},
        {"end": True, "at_s": 2.0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log) + '{"keys": [3')
    watched = reliability.Training(reliability.LIBRARIES["tfdata"], world.task(tmp_path), None, "", [], set())
    found = reliability.result(watched, world, gone=[9], errors_from=4)
    assert (found["delivered"], found["lost"], found["repeated"], found["altered"]) == (5, 6, 1, 1)
    assert (found["num_errors"], found["epoch_ended"], found["stderr_lines"]) == (1, True, 1)
