"""Custom training loops and functions: programs/custom_training.py, with loaderd and in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from usage_runner import Program, cases_of


@pytest.mark.parametrize(("program", "source"), cases_of("custom_training"))
def test_program(program: Program, source: str, judge: Callable[[Program, str], None]):
    judge(program, source)
