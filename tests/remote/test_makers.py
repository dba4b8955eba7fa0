"""How many calls wait for a maker."""

from __future__ import annotations

import pytest

from loaderd.gateway.makers import calls_per_maker


@pytest.mark.parametrize(("took_s", "calls"), [(0.0, 32), (0.002, 32), (0.02, 12), (0.06, 4), (30.0, 4)])
def test_as_many_as_have_their_turn_soon(took_s: float, calls: int):
    assert calls_per_maker(took_s) == calls
