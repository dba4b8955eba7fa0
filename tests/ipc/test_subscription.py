"""The options of a consumer's stream, as anybody may send them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from loaderd.errors import BusyError, OptionError, ServerError
from loaderd.ipc.subscription import Subscription


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({"batch_size": 1, 2: 3, b"a": 4}, "batch_size among them; got ['batch_size', 2, b'a']"),
        ({"epochs": 1}, "batch_size among them; got ['epochs']"),
        ({"batch_size": "x"}, "batch_size must be a positive integer, got 'x'"),
        ({"batch_size": 1, "shard": 5}, "shard must be "),
        ({"batch_size": 1, "sharing": []}, "sharing must be "),
        ({"batch_size": 1, "sharing": "mirrored", "consumers": 121}, "consumers must be at most 120"),
        ({"batch_size": 1, "name": "\n"}, "name must be "),
    ],
)
def test_options_that_are_wrong_are_refused(wire: Any, said: str):
    with pytest.raises(OptionError, match=re.escape(said)):
        Subscription.from_wire(wire)


def test_options_come_as_they_were_sent():
    sent = Subscription(64, epochs=None, sharing="split", shard=(1, 3), name="trainer ü")
    assert Subscription.from_wire(sent.to_wire()) == sent


@pytest.mark.parametrize(
    ("first", "second", "error", "why"),
    [
        ({"sharing": "mirrored", "consumers": 2}, {"consumers": 3}, ServerError, "consumers 3 instead of 2"),
        ({"sharing": "mirrored"}, {"batch_size": 20}, ServerError, "batch_size 20 instead of 10"),
        ({"sharing": "split", "shard": (0, 2)}, {"shard": (1, 3)}, ServerError, "shard (1, 3) instead of (0, 2)"),
        ({"sharing": "split", "shard": (0, 2)}, {}, BusyError, "a consumer with shard=(0, 2) already"),
        ({"sharing": "split", "shard": (0, 2)}, {"shard": (1, 2), "epochs": 2}, ServerError, "epochs 2 instead of 1"),
    ],
)
def test_who_does_not_fit_is_refused_with_the_reason(
    first: dict[str, Any], second: dict[str, Any], error: type[ServerError], why: str
):
    there = {"batch_size": 10, **first}
    with pytest.raises(error, match=re.escape(why)):
        Subscription(**{**there, **second}).check_beside([Subscription(**there)])
