"""Iterators in checkpoints: programs/checkpoints.py, with loaderd and in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from usage_runner import Program, cases_of


@pytest.mark.parametrize(("program", "source"), cases_of("checkpoints"))
def test_program(program: Program, source: str, judge: Callable[[Program, str], None]):
    judge(program, source)
