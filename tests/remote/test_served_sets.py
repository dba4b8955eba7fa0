"""The data sets that a maker keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loaderd.gateway import served
from loaderd.gateway.served import ServedSets


def test_the_shards_that_are_in_use_are_kept(monkeypatch: pytest.MonkeyPatch):
    """However many others come and go."""
    asked: list[Any] = []

    def answer(daemon: str, dataset: str, listing: Any) -> Any:
        asked.append(listing)
        return SimpleNamespace(grows=True), SimpleNamespace(listing=listing)

    monkeypatch.setattr(served, "ask_data", answer)
    monkeypatch.setattr(served, "data_of", lambda found: found)
    monkeypatch.setattr(served, "ServedSet", lambda dataset, data: SimpleNamespace(dataset=dataset, data=data))
    sets = ServedSets("unix:///nowhere")
    for number in range(1, 20):
        sets.get("train", 0)  # type: ignore[arg-type]  # any value will do for a listing
        sets.get("train", number)  # type: ignore[arg-type]
    assert asked == list(range(20))
