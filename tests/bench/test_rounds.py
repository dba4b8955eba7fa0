"""Wrong candidates are caught, turns are taken, a cold start is cold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from competitors import CANDIDATES, LIBRARIES
from harness.interface import Config, Step, configure
from harness.measured import FIRST_BATCH, digest
from harness.reference import Arrays, decode, parse, read
from harness.rounds import check, cold_starts, grouped, take_turns
from harness.run_candidate import CandidateError, LeftOut, run_candidate
from harness.synthetic import write_shards

from loaderd.storage.files import list_shards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    paths = write_shards(tmp_path_factory.mktemp("shards"), 1_001, num_shards=2)
    return Config(tuple(map(str, paths)), epochs=1, batch_size=100)


def rows_of(config: Config) -> Arrays:
    """All that the shards hold, in one batch."""
    schema = config.delivered()
    records = (record for file in list_shards(list(config.shards)) for record in read(file))
    return decode(schema, parse(schema, records))


def spoil(name: str, rows: Arrays) -> Arrays:
    """What a candidate of that name delivers instead of ``rows``."""
    last = len(rows["score"])
    picks = list(range(last))
    match name:
        case "loses":
            picks.pop(417)
        case "doubles":
            picks.append(417)
        case "replaces":
            picks[418] = 417
    spoiled = {field: array[picks] for field, array in rows.items()}
    if name == "alters":
        spoiled["board"][417, 3, 3, 7] = 1.0 - abs(spoiled["board"][417, 3, 3, 7])
    return spoiled


def test_a_candidate_that_loses_doubles_replaces_or_alters_one_record_is_caught(config: Config) -> None:
    def delivered(spec: str) -> dict[str, Any]:
        own = configure(spec, config)[1]
        rows = spoil(spec.partition(":")[0], rows_of(own))
        return {"digest": digest(iter([Step(len(rows["score"]), rows)]), own.delivered())}

    specs = ["honest", "honest:int8", "loses", "doubles", "replaces", "alters", "honest:graph", "alters:graph"]
    wrong, left_out = check(specs, config, delivered)
    assert list(wrong) == ["loses", "doubles", "replaces", "alters", "alters:graph"] and not left_out
    assert "loses: delivered {'rows': 1000," in wrong["loses"] and "but {'rows': 1001," in wrong["loses"]


def test_who_cannot_is_left_out_and_is_not_wrong(config: Config) -> None:
    def delivered(spec: str) -> dict[str, Any]:
        raise LeftOut("needs x") if spec == "a" else CandidateError("b: burst")

    wrong, left_out = check(["a", "a:graph", "b"], config, delivered)
    assert wrong == {"b": "b: burst"} and left_out == {"a": "needs x", "a:graph": "needs x"}
    assert grouped({"a": "needs x", "b": "is old", "a:graph": "needs x"}) == "a, a:graph (needs x); b (is old)"


@pytest.mark.slow
def test_a_cold_start_indexes_the_shards_and_the_next_one_does_not(config: Config, tmp_path: Path) -> None:
    def indexes() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.loaderd-index")}

    def first_batch(spec: str) -> dict[str, Any]:
        assert not indexes()
        endless = Config(config.shards, batch_size=100)
        return run_candidate(spec, endless, FIRST_BATCH, index_cache=tmp_path)

    logged: list[dict[str, Any]] = []
    (cold,), failures = cold_starts(["loaderd_python"], first_batch, logged.append)
    assert not failures and logged == [cold] and cold["cold"] and cold["time_to_first_batch_s"] > 0
    made = indexes()
    assert len(made) == len(config.shards)
    run_candidate("loaderd_python", Config(config.shards, batch_size=100), FIRST_BATCH, index_cache=tmp_path)
    assert indexes() == made


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


def test_every_module_is_registered_and_in_the_table_of_the_readme() -> None:
    assert {path.stem for path in (ROOT / "bench/candidates").glob("[!_]*.py")} == set(CANDIDATES)
    trainings = {path.stem for path in (ROOT / "bench/trainers").glob("*_epoch.py")}
    assert trainings == {f"{name}_epoch" for name in LIBRARIES}

    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "bench/README.md").read_text(), flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)", row)} >= set(CANDIDATES)
