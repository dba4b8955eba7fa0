"""Sets of steps in a message: all of them, as many as may be behind the mark of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.passes import Pass
from loaderd.protocol.messages import Start, encode
from loaderd.protocol.step_sets import MAX_SPAN, steps_in, text_of
from loaderd.protocol.untrusted import decode_strict


@given(steps=st.sets(st.integers(0, 300)), first=st.integers(0, 100) | st.just(1 << 37))
def test_the_way_back(steps: set[int], first: int):
    assert steps_in(text_of({first + step for step in steps}, first), first) == sorted(first + step for step in steps)


def test_what_is_before_the_first_is_left_out():
    assert steps_in(text_of([1, 2, 3, 9], 3), 3) == [3, 9]


@pytest.mark.parametrize("count", [20_000, MAX_SPAN, MAX_SPAN + 20])
def test_a_server_takes_as_many_as_there_are(count: int):
    """Of more than can be said, the lowest: the others come again."""
    message = decode_strict(encode(Start(1, Pass(0, 1), 5, text_of(range(5, 5 + count), 5))))
    assert isinstance(message, Start)
    assert steps_in(message.taken, message.step) == list(range(5, 5 + min(count, MAX_SPAN)))


@pytest.mark.parametrize("text", ["0", "xy", "ü0"])
def test_what_is_no_set(text: str):
    with pytest.raises(ValueError):
        steps_in(text, 0)
