"""The data sets that a maker keeps."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.gateway import served
from loaderd.gateway.served import ServedSets


class _Set:
    """A data set that grows, with the shards of ``listing``; it is its own data."""

    grows = True

    def __init__(self, listing: Any) -> None:
        self.dataset = self.data = self
        self.listing = listing
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[_Set]:
    """What the daemon is asked for, in order; if it is asked what there is now, that is "new"."""
    found: list[_Set] = []

    def answer(daemon: str, dataset: str, listing: Any) -> Any:
        found.append(_Set("new" if listing is None else listing))
        return found[-1], found[-1]

    monkeypatch.setattr(served, "ask_data", answer)
    monkeypatch.setattr(served, "data_of", lambda answered: answered)
    monkeypatch.setattr(served, "ServedSet", lambda dataset, data, on_wait: data)
    return found


def test_the_shards_that_are_in_use_are_kept(found: list[_Set]):
    """However many others come and go; the files of these are closed."""
    sets = ServedSets("unix:///nowhere")
    for number in range(1, 20):
        sets.get("train", 0)  # type: ignore[arg-type]  # any value will do for a listing
        sets.get("train", number)  # type: ignore[arg-type]
    assert [each.listing for each in found] == list(range(20))
    assert [each.closed for each in found] == [0] + 16 * [1] + 3 * [0]


def test_what_is_replaced_is_closed_but_not_while_another_name_has_it(found: list[_Set]):
    sets = ServedSets("unix:///nowhere")
    sets.get("train", None)
    for number in range(2):
        sets.get("train", number)  # type: ignore[arg-type]
    first = found[0]
    assert sets.get("train", "new") is first  # type: ignore[arg-type, comparison-overlap]  # None is forgotten next
    sets.get("train", 2)  # type: ignore[arg-type]
    assert not first.closed
    sets.get("train", None, is_new=True)
    assert first.closed == 1
