"""The programs of ``programs/``, with loaderd and in memory: they do the same, whoever makes the batches.

And no method of tf.data is forgotten, and the programs notice wrong batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.usage.usage_runner import Program, Programs, cases, check, check_refusal, files, programs_of

_NAMES = """
import tensorflow as tf
from usage import report
def of(thing):
    return [name for name in dir(thing) if name not in dir(object)]
parts = [getattr(tf.data.Options(), part) for part in ("autotune", "threading", "experimental_distribute")]
report(of(tf.data.Dataset), of(tf.data.experimental), of(tf.data.Options), sum(map(of, parts), []))
"""

# What Python itself asks of a class.
_OF_PYTHON = {
    *("__abstractmethods__", "__class_getitem__", "__dict__", "__module__", "__slots__", "__weakref__"),
    *("__firstlineno__", "__static_attributes__"),  # from 3.13 on
}
# Of tf.data.experimental, what takes no data set of ours: constants, classes of options (all are set in options.py),
# readers of other files; and what has programs in refused.py.
_NOT_FOR_DATA_SETS = {
    *("INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "SHARD_HINT", "AutoShardPolicy", "AutotuneAlgorithm"),
    *("AutotuneOptions", "DistributeOptions", "ExternalStatePolicy", "OptimizationOptions", "ServiceOptions"),
    *("ThreadingOptions", "CsvDataset", "SqlDataset", "make_batched_features_dataset", "make_csv_dataset"),
    *("service", "distributed_save", "at"),
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


@pytest.fixture
def names(programs: Programs, tmp_path: Path) -> list[list[str]]:
    """Of the installed TensorFlow: the methods of Dataset, the functions of tf.data.experimental, the options."""
    ended = programs.run(Program("names", "names", _NAMES), "memory", tmp_path)
    assert ended.status == 0, str(ended)
    return ended.reported


def test_every_method_of_a_dataset_has_a_program(names: list[list[str]]):
    programs = {program.name: program for program in programs_of("dataset_methods") if not program.apart}
    missing = set(names[0]) - set(programs) - _OF_PYTHON - {name for name in names[0] if _is_private(name)}
    assert not missing, "give it a program of its own in programs/dataset_methods.py"
    for name in set(names[0]) & set(programs):
        assert name in programs[name].code or name.startswith("__"), f"the program {name} doesn't use it"


def test_every_function_of_experimental_has_a_program(names: list[list[str]]):
    programs = {program.name: program for program in programs_of("experimental")}
    missing = {name for name in names[1] if not name.startswith("_")} - set(programs) - _NOT_FOR_DATA_SETS
    assert not missing, "give it a program of its own in programs/experimental.py"
    assert all(name in program.code for name, program in programs.items())


def test_every_option_has_a_program(names: list[list[str]]):
    code = "".join(program.code for program in programs_of("options"))
    for name in (*names[2], *names[3]):
        assert name.startswith("_") or name in code, f"no program sets {name}"


def test_there_are_enough_programs():
    """Of those that are not apart."""
    programs = [program for file in files() for program in programs_of(file) if not program.apart]
    assert len(programs) >= 120
    assert sum(len(program.through) for program in programs) >= 12 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(p, id=f"{f}.{p.name}") for f in files() for p in programs_of(f) if not p.says]
)
def test_every_program_notices_batches_in_another_order(program: Program, programs: Programs, tmp_path: Path):
    twin = programs.run(program, "memory", tmp_path)
    rotated = programs.run(program, "rotated", tmp_path)
    assert twin.status == rotated.status == program.fails, f"{twin}\n{rotated}"
    assert twin.reported != rotated.reported, "it would not notice batches in the places of others"


def _is_private(name: str) -> Any:
    return name.startswith("_") and not name.startswith("__")
