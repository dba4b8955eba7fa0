"""The programs of ``programs/``, with loaderd and in memory: they do the same, whoever makes the batches.

And no method of tf.data is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.usage.usage_runner import Program, Programs, cases, check, check_refusal, programs_of

_NAMES = """
import tensorflow as tf
from usage import report
report([name for name in dir(tf.data.Dataset) if name not in dir(object)])
"""

# What Python itself asks of a class.
_OF_PYTHON = {
    *("__abstractmethods__", "__class_getitem__", "__dict__", "__module__", "__slots__", "__weakref__"),
    *("__firstlineno__", "__static_attributes__"),  # from 3.13 on
}
# As many programs as the other files have together: two processes, so that neither runs for minutes.
_LONGEST = "dataset_methods"


@pytest.fixture
def ensure_server(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Starts a server for those that get their batches from one."""
    return lambda source: None if source == "loaderd" else request.getfixturevalue("usage_server")


@pytest.fixture
def run_alone(
    programs: Programs, tmp_path: Path, ensure_server: Callable[[str], None]
) -> Callable[[Program, str], None]:
    """Runs a program in a process of its own, and its twin in memory in another, and compares."""

    def run(program: Program, source: str) -> None:
        ensure_server(source)
        if program.says:
            check_refusal(program, programs.run(program, source, tmp_path))
            return
        twin = programs.run(program, "memory", tmp_path)
        check(program, programs.run(program, source, tmp_path), twin)

    return run


@pytest.fixture
def run_with_others(
    programs: Programs, tmp_path: Path, request: pytest.FixtureRequest, ensure_server: Callable[[str], None]
) -> Callable[[Program, str], None]:
    """The same in one process with others that are tested now, in the same way."""

    def run(program: Program, source: str) -> None:
        ensure_server(source)
        others = _programs_tested(request.session.items, program.file, source)
        twin = programs.run_together(others, "memory", tmp_path)[program]
        check(program, programs.run_together(others, source, tmp_path)[program], twin)

    return run


def _programs_tested(items: list[pytest.Item], file: str, source: str) -> tuple[Program, ...]:
    """The sociable ones of ``file`` if it is the longest one, and otherwise those of all files but that one."""
    parameters = [item.callspec.params for item in items if getattr(item, "originalname", "") == "test_program"]
    found = [each["program"] for each in parameters if each["source"] == source]
    return tuple(p for p in found if p.is_sociable and (p.file == _LONGEST) == (file == _LONGEST))


@pytest.mark.timeout(900)  # the first one runs half of them all
@pytest.mark.parametrize(("program", "source"), [case for case in cases() if not case.marks])
def test_program(
    program: Program,
    source: str,
    run_alone: Callable[[Program, str], None],
    run_with_others: Callable[[Program, str], None],
):
    (run_with_others if program.is_sociable else run_alone)(program, source)


@pytest.mark.slow  # most of them test_program runs with others in one process; what is apart says why
@pytest.mark.parametrize(
    ("program", "source"),
    [case for case in cases() if case.values[1] == "loaderd" or (case.marks and not case.values[0].is_sociable)],
)
def test_program_in_a_process_of_its_own(program: Program, source: str, run_alone: Callable[[Program, str], None]):
    run_alone(program, source)


def test_every_method_of_a_dataset_has_a_program(programs: Programs, tmp_path: Path):
    ended = programs.run(Program("names", "names", _NAMES), "memory", tmp_path)
    assert ended.status == 0, str(ended)
    (names,) = map(set, ended.reported)
    public = {name for name in names if name.startswith("__") or not name.startswith("_")}
    written = {program.name: program for program in programs_of("dataset_methods")}
    assert not public - set(written) - _OF_PYTHON, "give it a program of its own in programs/dataset_methods.py"
    for name in names & set(written):
        assert name in written[name].code or name.startswith("__"), f"the program {name} doesn't use it"
