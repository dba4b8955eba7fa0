"""Programs with loaders, without TensorFlow: every use with one of the ends, and every end."""

from __future__ import annotations

import pytest

from tests.endings.ending import BUSY_LIMIT_S, Runner, case
from tests.endings.ends import ENDS, some_apart
from tests.endings.specials import SPECIALS
from tests.endings.uses import LOADERS

# One of each kind. What is not here is near to one that is: a signal while nothing runs to one in a loop, sys.exit to
# an exception, multiprocessing and its pools to forks, asyncio.to_thread and a filled queue to a daemon thread. Every
# use ends with the file.
QUICK_ENDS = [
    *("exception", "SIGTERM in a loop", "SIGINT in a loop", "SIGKILL", "handler that takes a batch and exits"),
]
QUICK_USES = [
    *("iterator", "batches held", "packed batches", "reference cycle"),
    *("class with __del__ that reads", "atexit after", "daemon thread"),
]
QUICK_SPECIALS = [
    *("a thread gets all its batches", "a job of a pool gets all its batches", "many loaders leave nothing"),
    *("a fork inherits a loader and exits", "a fork outlives its parent", "SIGCHLD is ignored"),
    *("no more files can be opened", "slow data, loader, a daemon thread waits"),
    *("slow data, loader, SIGTERM", "slow data, Ctrl-C"),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("programs"))


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_every_end_is_what_it_is_without_loaderd(runner: Runner, end: str):
    """So the statuses and texts that the other tests wait for are Python's own."""
    runner.run(case("nothing", end, tensorflow=False), BUSY_LIMIT_S).check()


@pytest.mark.parametrize("end", some_apart(ENDS, QUICK_ENDS))
def test_every_end(runner: Runner, end: str):
    runner.run(case("iterator", end, tensorflow=False), BUSY_LIMIT_S).check()


@pytest.mark.parametrize("use", some_apart(LOADERS, QUICK_USES))
def test_every_use(runner: Runner, use: str):
    runner.run(case(use, "end of file", tensorflow=False), BUSY_LIMIT_S).check()


@pytest.mark.parametrize("name", some_apart((one.name for one in SPECIALS if not one.tensorflow), QUICK_SPECIALS))
def test_what_ends_in_a_way_of_its_own(runner: Runner, name: str):
    (special,) = (one for one in SPECIALS if one.name == name)
    runner.run(special, BUSY_LIMIT_S).check()
