"""A data set that grows, as a server prepares its shards for consumers that are in different epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loaderd.daemon import catalog
from loaderd.daemon.catalog import ServedDataset
from loaderd.plan.passes import Listing
from loaderd.storage.shard_file import ShardFile


class Preparation:
    """Says what it was asked for; is finished when the daemon goes round for the second time."""

    def __init__(
        self,
        dataset: Any,
        options: Any,
        worker_manager: Any,
        listing: Listing | None = None,
        known: Any = None,
        found_before: Any = None,
        manifest: Any = None,
    ) -> None:
        self.listing, self.found_before = listing, found_before
        self.rounds = 0
        self.error: Exception | None = None
        self.data: Any = None
        self.indexes: dict[Any, Any] = {}
        self.progress = None

    @property
    def finished(self) -> bool:
        return self.rounds >= 2

    def advance(self) -> None:
        self.rounds += 1

    def take_warnings(self) -> list[str]:
        return []

    @property
    def fixed_sets(self) -> list[list[ShardFile] | None]:
        return [None, [ShardFile("/fixed/0", 1, 2)]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedDataset:
    """A data set that grows."""
    monkeypatch.setattr(catalog, "LocalPreparation", Preparation)
    monkeypatch.setattr(ServedDataset, "_log_what_there_is", lambda *_: None)
    leaves = [SimpleNamespace(grows=grows) for grows in (True, False)]
    grows = cast(Any, SimpleNamespace(grows=True, leaves=lambda: leaves, names=lambda: ["a", "b"]))
    return ServedDataset("train", "sets:train", grows, cast(Any, None), cast(Any, None), None, None)


def test_an_early_consumer_has_the_same_shards_as_others_in_later_epochs(served: ServedDataset):
    """It came while the server listed them."""
    description = cast(Any, SimpleNamespace(dataset=None, options=None, start=None))
    first, prepare = cast(Any, served.prepare(description))
    assert first.found_before is None
    digests = {"b shards": "1 records in 1 shards, digest 0"}
    cast(Any, served.preparation).data = SimpleNamespace(left_out="", digests=digests)
    served.advance()
    assert prepare(None, {}).found_before == [None, ["/fixed/0"]]
