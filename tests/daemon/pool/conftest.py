"""What the tests of workers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon.line_run import Line


@pytest.fixture
def line_of() -> Iterator[Any]:
    """Makes a :class:`Line`, and closes it."""
    made: list[Line] = []

    def make(*sizes: int, **more: Any) -> Line:
        made.append(Line(*sizes, **more))
        return made[-1]

    yield make
    for line in made:
        line.crew.close()
