"""Ratios are formed within a round, and of like with like; the best tf.data is the one with the best median."""

from __future__ import annotations

from typing import Any

from harness.report import COLUMNS, Spread, Summary, best_tfdata, markdown, summarise


def _run(candidate: str, number: int, examples_per_s: float, **config: Any) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "round": number,
        "examples_per_s": examples_per_s,
        "total_cpu_us_per_example": 2.0 + number,
        "consumer_cpu_us_per_batch": 40.0,
        "time_to_first_batch_s": 0.5,
        "peak_pss_bytes": 3 << 20,
        "other_cores": 0.0,
        "delivered": "packed" if config.get("packed") else config.get("dtype", "float32"),
        "note": "no CRC check" if candidate == "tfdata_b" else "",
        "config": {"dtype": "float32", "packed": False, "workers": 2, "shuffle": True, "graph": False, **config},
    }


# The machine is twice as slow in round 1 as in the others; loaderd's ratio is 2, 2, 4 all the same.
RUNS = [
    *(_run("tfdata_expert", number, speed) for number, speed in enumerate((100, 50, 100))),
    *(_run("tfdata_b", number, speed) for number, speed in enumerate((300, 10, 20))),
    *(_run("loaderd_x", number, speed) for number, speed in enumerate((200, 100, 400))),
]


def test_the_best_is_that_of_the_best_median_and_not_of_the_best_run() -> None:
    assert best_tfdata(RUNS) == "tfdata_expert"
    assert best_tfdata([run for run in RUNS if run["candidate"] == "loaderd_x"]) is None


def test_ratios_are_taken_round_by_round() -> None:
    first, second, third = summarise(RUNS, [_run("loaderd_x", 0, 1.0) | {"time_to_first_batch_s": 3.0}])
    assert first.to_best == first.to_expert == Spread(1.0, 1.0, 1.0)
    assert second.to_best == Spread(0.2, 0.2, 3.0)
    assert third.to_best == Spread(2.0, 2.0, 4.0)
    assert third.examples_per_s == Spread(200, 100, 400)
    assert third.total_cpu_us_per_example == 3.0
    assert (second.cold_s, third.cold_s, third.warm_s) == (None, 3.0, 0.5)


def test_without_a_cold_start_the_first_round_makes_the_index_and_is_not_warm() -> None:
    runs = [_run("loaderd_x", number, 1.0) | {"time_to_first_batch_s": s} for number, s in enumerate((9.0, 1.0, 2.0))]
    (summary,) = summarise(runs)
    assert (summary.cold_s, summary.warm_s) == (None, 1.5)
    (summary,) = summarise(runs[:1])
    assert summary.warm_s is None and summary.cells()[COLUMNS.index("warm")] == "–"
    (summary,) = summarise(runs, [runs[0]])
    assert summary.warm_s == 2.0, "all rounds are warm"


def test_like_is_compared_with_like() -> None:
    runs = [
        _run("tfdata_expert", 0, 100),
        _run("tfdata_expert:noshuffle", 0, 120, shuffle=False),
        _run("tfdata_expert:graph", 0, 140, graph=True),
        _run("tfdata_expert:int8", 0, 200, dtype="int8"),
        _run("tfdata_parse:packed", 0, 400, packed=True),
        _run("floor", 0, 1000),
        _run("floor:1worker", 0, 600, workers=1),
        _run("loaderd_x", 0, 500),
        _run("loaderd_x:1worker", 0, 300, workers=1),
        _run("loaderd_x:int8", 0, 800, dtype="int8"),
        _run("loaderd_x:packed", 0, 2000, packed=True),
    ]
    found = {summary.candidate: summary for summary in summarise(runs)}

    def ratios(spec: str) -> list[float | None]:
        summary = found[spec]
        return [each and each.middle for each in (summary.to_expert, summary.to_best, summary.to_floor)]

    assert ratios("loaderd_x") == [5.0, 500 / 140, 0.5]
    assert ratios("loaderd_x:1worker") == [3.0, 300 / 140, 0.5]
    assert ratios("loaderd_x:int8") == [4.0, 4.0, None]
    assert ratios("loaderd_x:packed") == [5.0, 5.0, None]


def test_the_page_holds_the_facts_and_a_row_a_candidate() -> None:
    page = markdown(COLUMNS, map(Summary.cells, summarise(RUNS)), {"machine": "a fast one"})
    lines = page.splitlines()
    assert lines[0] == "- machine: a fast one"
    assert lines[2].count("|") == lines[-1].count("|") == len(COLUMNS) + 1
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["tfdata_expert", "tfdata_b", "loaderd_x"]
    assert lines[-2].endswith(" no CRC check |") and lines[-1].endswith("  |")
    assert "200 (100–400)" in lines[-1] and "2.00 (2.00–4.00)" in lines[-1]
