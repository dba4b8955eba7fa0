"""Named tuples from plain values."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from loaderd.ipc.decoding import decoder_of, message_decoder_of


class _Inner(NamedTuple):
    number: int


class _Outer(NamedTuple):
    inner: _Inner | None = None
    anything: list[object] | None = None
    several: tuple[_Inner, ...] = ()


def test_fields_with_a_default_may_be_missing():
    decode = message_decoder_of(_Outer)
    assert decode([]) == _Outer() and decode([[5]]) == _Outer(_Inner(5))
    found = decode([None, [1, [2]], [[3], [4]]])
    assert found == _Outer(None, [1, [2]], (_Inner(3), _Inner(4))) and type(found.several[1]) is _Inner


@pytest.mark.parametrize(("kind", "values"), [(_Inner, []), (_Inner, [1, 2]), (_Outer, [None, None, [], 4])])
def test_of_another_number_of_fields_there_is_no_message(kind: type, values: list[object]):
    with pytest.raises(TypeError):
        message_decoder_of(kind)(values)


def test_what_is_plain_needs_no_decoder():
    assert [decoder_of(kind) for kind in (int, dict[str, int], list[list[int]], str | None)] == [None] * 4
