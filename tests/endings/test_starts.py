"""Programs that are started in other ways than by the name of a script, and programs of a server's consumers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.endings.ending import BUSY_LIMIT_S, PRELUDE, TENSORFLOW, Case, Runner, case
from tests.endings.ends import TRACEBACK, End
from tests.helpers.serving import Server

ITERATOR = "it = iter(loader())\nfor _ in range(20):\n    batch = next(it)\n\n"
OF_DATA_SET = TENSORFLOW + "it = iter(data_set())\nfor _ in range(20):\n    batch = next(it)\n\n"
# The interpreter that reads statements one by one shows what it is given.
PROMPTS = r"Python .*\n.*\n(?:>>> |\.\.\. )*\n?"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(ITERATOR, id="loader"),
        # TensorFlow is imported anew for it; in a process of its own it ends in the next test too.
        pytest.param(OF_DATA_SET, id="data set", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("command", "as_stdin", "stderr"),
    [
        pytest.param(["-m", "program"], False, "", id="python -m"),
        pytest.param(["-c", "SCRIPT"], False, "", id="python -c"),
        pytest.param(["-"], True, "", id="stdin", marks=pytest.mark.slow),
        pytest.param(["-i"], True, PROMPTS, id="python -i"),
        pytest.param(["-X", "dev", "{}"], False, "", id="python -X dev", marks=pytest.mark.slow),
        pytest.param(
            *(["-c", "import runpy; runpy.run_path('{}', run_name='__main__')"], False, ""),
            id="runpy",
            marks=pytest.mark.slow,
        ),
        pytest.param(["-c", "import program"], False, "", id="imported"),
    ],
)
def test_a_program_ends_however_it_was_started(
    runner: Runner, lines: str, command: list[str], as_stdin: bool, stderr: str
):
    if lines is OF_DATA_SET and command[0] != "-i":
        pytest.skip("what TensorFlow does is the same in all of them, and its import takes long")
    script = PRELUDE + lines + "last_line()\n"
    found = Case("started", script, End("", stderr=stderr))
    command = [script if part == "SCRIPT" else part for part in command]
    runner.run_command(found, *command, stdin=script if as_stdin else "", limit_s=BUSY_LIMIT_S).check()


@pytest.mark.slow
def test_a_fresh_process_of_tensorflow(runner: Runner):
    """Nothing is frozen, and all of its modules are collected at the end."""
    lines = PRELUDE + OF_DATA_SET + "last_line()\nraise ValueError('mine')\n"
    end = End("", 1, stderr=TRACEBACK + "ValueError: mine\n")
    runner.run_command(Case("fresh", lines, end), "{}", limit_s=BUSY_LIMIT_S).check()


@pytest.fixture(scope="module")
def addresses(runner: Runner) -> Iterator[list[str]]:
    """Of real servers: on this machine, and on the network."""
    servers = [
        Server(runner.folder, "datasets:train", "--workers", "1", network=network, **runner.environment)
        for network in (False, True)
    ]
    try:
        servers[1].wait_ready()
        yield [f"unix://{servers[0].path}", servers[1].address]
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.wait_end()
            server.close()


@pytest.mark.slow
@pytest.mark.parametrize("network", [False, True], ids=["unix", "network"])
@pytest.mark.parametrize(
    ("use", "end", "tensorflow"),
    [
        ("iterator", "end of file", False),
        ("batches held", "exception", False),
        ("daemon thread", "end of file", False),
        ("iterator", "SIGTERM in a loop", False),
        ("iterator", "end of file", True),  # most programs of usage are these
        ("shuffle", "exception", True),
        ("fit left by an exception", "end of file", True),
    ],
)
def test_consumers_of_a_server(
    runner: Runner, addresses: list[str], use: str, end: str, tensorflow: bool, network: bool
):
    consumer = replace(case(use, end, tensorflow), environment={"SOURCE": addresses[network]})
    runner.run(consumer, BUSY_LIMIT_S).check()


def test_the_programs_use_this_loaderd(runner: Runner):
    import loaderd

    end = End("", stdout=os.path.realpath(loaderd.__file__) + "\n")
    script = PRELUDE + "import loaderd\nprint(os.path.realpath(loaderd.__file__))\nlast_line()\n"
    runner.run(Case("which", script, end), BUSY_LIMIT_S).check()
