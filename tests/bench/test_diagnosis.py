"""Trainings in which one thing is wrong, each in a process of its own: the diagnosis names it.

Each takes six seconds. Beside other tests, it may be the cores that are wrong; then it names them.
"""

from __future__ import annotations

from collections.abc import Iterator

import diagnosis as scenarios
import pytest


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with scenarios.storage(tmp_path_factory.mktemp("shards"), records=30_000) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_the_diagnosis_is_right(name: str, places: dict[str, str]):
    scenario = scenarios.SCENARIOS[name]
    found = scenarios.run(name, places[scenario.shards], seconds=6.5)
    if found["verdict"] == "too little CPU" != scenario.verdict:
        assert "others use" in found["cause"] and found["gain"] == 1, found
        return
    assert found["verdict"] == scenario.verdict, found
    assert found["limiting_stage"] in scenario.limiting, found
