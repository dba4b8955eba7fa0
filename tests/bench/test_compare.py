"""``bench/compare.py`` from end to end, as a user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.synthetic import write_shards

Compare = Callable[..., subprocess.CompletedProcess[str]]

_SCHEMA = """
import numpy as np
import loaderd

def double(score):
    return np.asarray(score, np.float32) * 2

schema = loaderd.Schema(
    features={"d": loaderd.PackedBits(8 * 194), "s": loaderd.Int64()},
    fields={
        "planes": loaderd.Bits("d", shape=(97, 16), scale=tuple(range(1, 17)), dtype="int16"),
        "twice": loaderd.Derived(double, inputs="score"),
    },
    intermediates={"score": loaderd.Array("s")},
)

noise = loaderd.Schema(schema.features, {"x": loaderd.Derived(lambda random: random.random(), (), random=True)})
"""

# Candidates of the folder that the command runs in; what they deliver comes from the plain reading.
_CANDIDATE = """
import os, time
from pathlib import Path
import numpy as np
from harness.interface import Step
from harness.reference import decode, parse, read
from loaderd.storage.files import list_shards

def steps(config):
    EFFECT
    while True:
        schema = config.delivered()
        for file in list_shards(list(config.shards)):
            batch = decode(schema, parse(schema, read(file)))
            yield Step(len(batch["score"]), batch)
        if config.epochs == 1:
            return
"""
_SLOW_WHEN_COLD = """
    seen = Path(os.environ["LOADERD_CACHE_DIR"]) / "seen"
    if not seen.exists():
        time.sleep(1)
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()
"""


def add_candidates(tmp_path: Path, **effects: str) -> None:
    (tmp_path / "candidates").mkdir()
    for name, effect in effects.items():
        (tmp_path / "candidates" / f"{name}.py").write_text(_CANDIDATE.replace("    EFFECT", effect))


def runs_of(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "loaderd-bench" / "x.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rows_of(tmp_path: Path) -> dict[str, list[str]]:
    """The cells of the table by candidate."""
    lines = (tmp_path / "loaderd-bench" / "x.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows}


@pytest.mark.slow
def test_synthetic_chess_records(compare: Compare, tmp_path: Path) -> None:
    specs = ["tfdata_expert", "loaderd_python", "floor"]
    done = compare("--records", "6000", "--num-shards", "4", "--rounds", "1", "--candidates", " ".join(specs))
    assert done.returncode == 0, done.stdout + done.stderr
    runs = runs_of(tmp_path)
    assert [run["candidate"] for run in runs if run.get("cold")] == specs
    timed = [run for run in runs if not run.get("cold")]
    assert [(run["round"], run["candidate"]) for run in timed] == [(0, spec) for spec in specs]
    for run in timed:
        assert run["seconds"] >= 0.2 and run["examples_per_s"] == run["examples"] / run["seconds"]
        assert run["total_cpu_s"] >= run["consumer_cpu_s"] - 0.05 and run["consumer_cpu_s"] > 0
    by_name = {run["candidate"]: run for run in timed}
    assert by_name["tfdata_expert"]["peak_pss_bytes"] > 100 << 20
    assert "tensorflow" in by_name["tfdata_expert"]["versions"]
    # loaderd's work is done by its descendants: what its consumer spends is the lesser part of the whole.
    python = by_name["loaderd_python"]
    assert python["total_cpu_s"] > 1.5 * python["consumer_cpu_s"]
    assert "tensorflow" not in python["versions"]

    rows = rows_of(tmp_path)
    assert list(rows)[2:] == specs and rows["floor"][4] == "100%"
    assert "–" not in {rows["loaderd_python"][column] for column in range(1, len(rows["candidate"]) - 1)}
    page = (tmp_path / "loaderd-bench" / "x.md").read_text()
    for fact in ("machine: ", "command: `python ", "best tf.data: tfdata_expert", "shards: 6,000 synthetic"):
        assert f"- {fact}" in page
    assert all(f">{spec}</text>" in (tmp_path / "loaderd-bench" / "x.svg").read_text() for spec in specs)


def test_a_first_impression(compare: Compare, tmp_path: Path) -> None:
    """Two rounds, and no runs for the first batch; what takes the time beside that is the number of candidates."""
    add_candidates(tmp_path, mine="")
    done = compare("--quick", "--records", "600", "--num-shards", "2", "--candidates", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(run["candidate"], run["round"], "cold" in run) for run in runs_of(tmp_path)] == [
        ("mine", 0, False),
        ("mine", 1, False),
    ]


def test_the_users_shards_with_a_schema_of_their_folder(compare: Compare, tmp_path: Path) -> None:
    (tmp_path / "my_records.py").write_text(_SCHEMA)
    write_shards(tmp_path / "mine", 3_000, num_shards=5, compression="GZIP")
    add_candidates(tmp_path)
    (tmp_path / "candidates" / "absent.py").write_text("import a_package_that_is_not_there\n")
    done = compare(
        "mine/*.tfrecord",
        *("--schema", "my_records:schema", "--rounds", "1", "--max-gib", "0.0003"),
        *("--candidates", "loaderd_python loaderd_python:int8 absent"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    timed = [run for run in runs_of(tmp_path) if not run.get("cold")]
    assert [run["candidate"] for run in timed] == ["loaderd_python"]
    assert timed[0]["config"]["compression"] == "GZIP"
    page = (tmp_path / "loaderd-bench" / "x.md").read_text()
    assert "shards: 3 shards of 5, 0.3 MB, compression GZIP" in page and "(float32)" not in page
    assert "loaderd_python:int8 (my_records:schema is no function of a dtype)" in page
    assert "absent (needs a_package_that_is_not_there, which is not installed)" in page


@pytest.mark.slow
def test_what_fails_is_named_and_the_first_batch_without_an_index_is_timed_apart(
    compare: Compare, tmp_path: Path
) -> None:
    add_candidates(
        tmp_path,
        honest=_SLOW_WHEN_COLD,
        broken="    if os.fork() == 0: time.sleep(600)\n    raise RuntimeError('the pipeline burst')",
        stuck="    time.sleep(600)",
        ends="    config = type(config)(**{**vars(config), 'epochs': 1})",
    )
    done = compare(
        *("--records", "600", "--num-shards", "2", "--rounds", "2", "--timeout", "5"),
        *("--candidates", "honest broken stuck ends"),
    )
    assert done.returncode == 1
    assert {run["candidate"] for run in runs_of(tmp_path) if not run.get("cold")} == {"honest"}
    assert "broken: ended with status 1" in done.stdout and "the pipeline burst" in done.stdout
    assert "stuck: not done after 5 s" in done.stdout
    assert "ends: ended with status 1" in done.stdout and "it must go on for ever" in done.stdout
    row = rows_of(tmp_path)["honest"]
    assert float(row[8]) >= 1.0 > float(row[9])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--candidates", "floor:sideways"], "option must be one of ['1worker',"),
        (["--candidates", "floor", "--rounds", "0"], "--rounds must be a number of at least 1, got 0"),
        (["absent.tfrecord"], "absent.tfrecord does not exist"),
        (["--schema", "json:loads"], "--schema says what is in SHARDS"),
        (["here.tfrecord", "--schema", "chess_evil"], "Did you mean chess_eval?"),
        (["here.tfrecord", "--schema", "my_records:noise"], "my_records:noise must draw no random numbers"),
        (["--record-size", "4000000000"], "record_size must be 4 to 1048576 bytes, got 4000000000"),
        (
            ["here.tfrecord", "--results-dir", "here.tfrecord/x"],
            "cannot be written to here.tfrecord/x/x.jsonl: Not a",
        ),
        (
            ["empty.tfrecord"],
            "the first shards must hold records, to check what candidates deliver; none is in empty.",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(
    arguments: list[str], complaint: str, compare: Compare, tmp_path: Path
) -> None:
    (tmp_path / "my_records.py").write_text(_SCHEMA)
    (tmp_path / "empty.tfrecord").touch()
    (path,) = write_shards(tmp_path, 5, num_shards=1)
    path.rename(tmp_path / "here.tfrecord")
    done = compare(*arguments, *([] if "--candidates" in arguments else ["--candidates", "loaderd_python"]))
    assert done.returncode == 2 and complaint in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
