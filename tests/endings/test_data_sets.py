"""Programs with data sets of TensorFlow: every use at the end of the file, and every end."""

from __future__ import annotations

import pytest

from tests.endings.ending import BUSY_LIMIT_S, Case, Runner, case
from tests.endings.ends import ENDS, some_apart
from tests.endings.specials import SPECIALS
from tests.endings.uses import DATA_SETS

# One of each kind; test_loaders.py has more ends.
QUICK_ENDS = ["exception", "SIGTERM in a loop", "SIGINT in a loop"]
QUICK_USES = [
    *("iterator", "tf.function", "map of a Python function", "from_generator", "fit left by an exception"),
    *("class with __del__ that reads", "atexit after", "daemon thread"),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("use", some_apart(DATA_SETS, QUICK_USES))
def test_every_use(runner: Runner, use: str):
    runner.run(case(use, "end of file", tensorflow=True), BUSY_LIMIT_S).check()


@pytest.mark.slow
@pytest.mark.parametrize("end", [end for end in ENDS if end not in (*QUICK_ENDS, "end of file")])
def test_every_other_end(runner: Runner, end: str):
    runner.run(case("iterator", end, tensorflow=True), BUSY_LIMIT_S).check()


@pytest.mark.parametrize("end", QUICK_ENDS)
def test_ends(runner: Runner, end: str):
    runner.run(case("iterator", end, tensorflow=True), BUSY_LIMIT_S).check()


@pytest.mark.parametrize("special", [one for one in SPECIALS if one.tensorflow], ids=lambda one: one.name)
def test_what_ends_in_a_way_of_its_own(runner: Runner, special: Case):
    runner.run(special, BUSY_LIMIT_S).check()
