"""Ratios are formed within a round; the baseline is the tf.data candidate with the best median."""

from __future__ import annotations

from typing import Any

from loaderd.bench.report import COLUMNS, Spread, baseline, markdown, summarise


def _run(candidate: str, number: int, examples_per_s: float) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "round": number,
        "examples_per_s": examples_per_s,
        "total_cpu_us_per_example": 2.0 + number,
        "consumer_cpu_us_per_batch": 40.0,
        "time_to_first_batch_s": 0.5,
        "peak_pss_bytes": 3 << 20,
        "other_cores": 0.0,
    }


# The machine is twice as slow in round 1 as in the others; loaderd's ratio is 2, 2, 4 all the same.
RUNS = [
    *(_run("tfdata_a", number, speed) for number, speed in enumerate((100, 50, 100))),
    *(_run("tfdata_b", number, speed) for number, speed in enumerate((300, 10, 20))),
    *(_run("loaderd_x", number, speed) for number, speed in enumerate((200, 100, 400))),
]


def test_the_baseline_is_the_best_median_and_not_the_best_run() -> None:
    assert baseline(RUNS) == "tfdata_a"
    assert baseline([run for run in RUNS if run["candidate"] == "loaderd_x"]) is None


def test_ratios_are_taken_round_by_round() -> None:
    first, second, third = summarise(RUNS)
    assert first.ratio == Spread(1.0, 1.0, 1.0)
    assert second.ratio == Spread(0.2, 0.2, 3.0)
    assert third.ratio == Spread(2.0, 2.0, 4.0)
    assert third.examples_per_s == Spread(200, 100, 400)
    assert third.total_cpu_us_per_example == 3.0


def test_a_round_without_the_baseline_gives_no_ratio() -> None:
    runs = [_run("tfdata_a", 0, 100), _run("loaderd_x", 0, 300), _run("loaderd_x", 1, 900)]
    assert summarise(runs)[1].ratio == Spread(3.0, 3.0, 3.0)
    assert summarise(runs[2:])[0].ratio is None


def test_the_page_holds_the_facts_and_a_row_a_candidate() -> None:
    page = markdown(summarise(RUNS), {"machine": "a fast one"})
    lines = page.splitlines()
    assert lines[0] == "- machine: a fast one"
    assert lines[2].count("|") == lines[-1].count("|") == len(COLUMNS) + 1
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["tfdata_a", "tfdata_b", "loaderd_x"]
    assert "200 (100–400)" in lines[-1] and "2.00 (2.00–4.00)" in lines[-1]
