"""How long each field takes, by a clock that is read now and then."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loaderd.decode.batch_decoder import BatchDecoder, _SampledTimer
from loaderd.schema import Array, Derived, Int64, Schema

AnyArray = npt.NDArray[Any]
pytestmark = pytest.mark.usefixtures("kernels")


def test_a_call_that_is_timed_stands_for_those_that_are_not():
    clock = _SampledTimer()
    weights = []
    for _ in range(16 * 5 + 1):
        weights.append(clock.begin())
        if weights[-1]:
            clock.end()
    assert sum(weights) == 16 * 5 + 1 and weights.count(0) == 15 * 5


def test_a_timed_call_that_raises_does_not_end_the_timing():
    clock = _SampledTimer()
    assert clock.begin() == 1  # and no end: the function of a derived field raised
    assert clock.begin() == 1


def test_long_calls_are_all_timed():
    clock = _SampledTimer()
    for _ in range(3):
        assert clock.begin() == 1
        time.sleep(0.0011)
        clock.end()


def test_the_time_of_each_field_is_added_up():
    def sleep(number: AnyArray) -> AnyArray:
        time.sleep(0.01)
        return number

    schema = Schema(
        {"a": Int64()},
        {"slow": Derived(sleep, inputs="hidden", shape=(), dtype="int64"), "a": Array("a")},
        {"hidden": Array("a")},
    )
    rows = np.zeros((4, schema.row_bytes), np.uint8)
    out: dict[str, AnyArray] = {name: np.zeros(4, np.int64) for name in ("slow", "a")}
    assert schema.made_fields == ["hidden", "slow", "a"]
    for _ in range(5):  # until no other field was interrupted for long, on a machine that does other things, too
        spent, few = [0] * 3, [0] * 2
        for places in (spent, few):
            decoder = BatchDecoder(schema, places, len(places))
            for _ in range(3):
                decoder.decode(rows, out)
        if max(spent[0], spent[2]) < spent[1] / 2 and few[0] < few[1] / 2:
            break
    assert spent[1] >= 30_000_000 and max(spent[0], spent[2]) < spent[1] / 2 and min(spent) > 0
    assert few[1] >= 30_000_000 and 0 < few[0] < few[1] / 2, "the last place is for all the rest"
