"""Where TensorFlow writes in place: programs/in_place.py, with loaderd and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from usage_runner import Program, cases_of

IN_EVERY_WAY = ("slice_times_two", "chain", "accumulate")  # the others share a data set in one way, and apart in all


def cases() -> Iterator[Any]:
    for case in cases_of("in_place"):
        program, source = case.values
        is_apart = program.name not in IN_EVERY_WAY and source != program.through[0]
        yield pytest.param(program, source, id=case.id, marks=[*case.marks, *[pytest.mark.slow] * is_apart])


@pytest.mark.parametrize(("program", "source"), list(cases()))
def test_program(program: Program, source: str, judge: Callable[[Program, str], None]):
    judge(program, source)
