"""What cannot work is refused: programs/refused.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from usage_runner import Program, cases_of


@pytest.mark.parametrize(("program", "source"), cases_of("refused"))
def test_refusal(program: Program, source: str, judge: Callable[[Program, str], None]):
    judge(program, source)
