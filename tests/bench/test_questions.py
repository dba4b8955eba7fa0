"""The questions: each script from end to end on a tiny set, and what they conclude."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ["--records", "4096", "--rounds", "1", "--seconds", "0.1", "--warmup-seconds", "0", "--attempts", "1"]

# What is asked of each script, and one figure of the configuration by case, in the order of the table.
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "batch_size": ("--sizes 64", "batch_size", {"64, in Python": 64, "64, in a tf.function": 64}),
    "compressed": (
        "--num-shards 2",
        "compression",
        {"plain, 2 shards": "", "GZIP, 2 shards": "GZIP", "ZLIB, 2 shards": "ZLIB"},
    ),
    "crc_cost": ("", "workers", {"loaderd in Python": 2}),
    "dtype": (
        "--dtypes bfloat16 bool packed",
        "dtype",
        {"bfloat16": "bfloat16", "bool": "bool", "packed": "float32"},
    ),
    "filter": (
        "--no-all",
        "one_in",
        {"tf.data, 1 in 10": 10, "loaderd, 1 in 10": 10},
    ),
    "parquet": (
        "--sizes 1024",
        "shuffle",
        {"pyarrow's scanner, 1,024": False, "loaderd in order, 1,024": False, "loaderd shuffled, 1,024": True},
    ),
    "sparse": (
        "",
        "records",
        {
            **{"copying the output": 4096, "bullet()": 4096, "bullet(), a bucket for each square of a king": 4096},
            **{"nnue_bin()": 4096, "bullet(), numpy": 4096, "nnue_bin(), numpy": 4096, "a loader of bullet()": 4096},
        },
    ),
    "window": ("--sizes 1024 4096", "window_records", {"1,024": 1024, "4,096": 4096}),
    "workers": (
        "",
        "workers",
        {
            **{"loaderd_python, 1 worker": 1, "loaderd_python, 2 workers": 2, "loaderd_python, 4 workers": 4},
            **{"floor, 1 worker": 1, "floor, 2 workers": 2, "floor, 4 workers": 4},
        },
    ),
}
CRC_ROWS = ("both CRCs checked", "that of the length alone")


@pytest.mark.slow
@pytest.mark.parametrize("question", ASKED)
def test_a_question_is_answered(question: str, tmp_path: Path) -> None:
    more, varied, expected = ASKED[question]
    places = ["--work-dir", str(tmp_path / "work"), "--results-dir", str(tmp_path)]
    command = [sys.executable, str(BENCH / f"{question}.py"), *TINY, *more.split(), *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in (tmp_path / f"{question}.jsonl").read_text().splitlines()]
    if question == "crc_cost":
        costs = runs.pop()["load_step_ns"]
        assert list(costs) == list(CRC_ROWS) and all(len(of_one) == 15 for of_one in costs.values())
    assert {run["case"]: run["config"][varied] for run in runs} == expected and len(runs) == len(expected)
    page = (tmp_path / f"{question}.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(CRC_ROWS if question == "crc_cost" else expected)
    assert "- machine: " in page and f"{question}.py --records 4096" in page
    if question == "dtype":
        assert "packed: 202 bytes an example" in page and "bool: 1,550 bytes an example" in page
