"""Shards of a data set that grows, as a server prepares them: for consumers that are in epochs of different ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loaderd.daemon import catalog
from loaderd.daemon.catalog import ServedDataset
from loaderd.errors import NoShardsError
from loaderd.plan.passes import Listing
from loaderd.storage.shard_file import ShardFile


class Preparation:
    """Is finished when the daemon goes round for the second time, unless ``held``; time is counted by hand."""

    now_s = 0.0
    held = False

    def __init__(
        self,
        dataset: Any,
        options: Any,
        worker_manager: Any,
        listing: Listing | None = None,
        known: Any = None,
        found_before: Any = None,
        manifests: Any = (),
    ) -> None:
        self.listing, self.found_before = listing, found_before
        self.rounds = 0
        self.finished_s: float | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self.data: Any = None
        self.indexes: dict[Any, Any] = {}
        self.progress = None

    @property
    def finished(self) -> bool:
        return self.finished_s is not None

    @property
    def age_s(self) -> float:
        return 0.0 if self.finished_s is None else Preparation.now_s - self.finished_s

    def advance(self) -> None:
        self.rounds += 1
        if self.rounds == 2 and not Preparation.held:
            self.finished_s = Preparation.now_s

    def take_warnings(self) -> list[str]:
        return []

    @property
    def fixed_sets(self) -> list[list[ShardFile] | None]:
        return [None, [ShardFile("/fixed/0", 1, 2)]]

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedDataset:
    """A data set that grows."""
    monkeypatch.setattr(Preparation, "now_s", 0.0)
    monkeypatch.setattr(Preparation, "held", False)
    monkeypatch.setattr(catalog, "LocalPreparation", Preparation)
    monkeypatch.setattr(catalog, "time", SimpleNamespace(monotonic=lambda: Preparation.now_s))
    leaves = [SimpleNamespace(grows=grows) for grows in (True, False)]
    grows = cast(Any, SimpleNamespace(grows=True, leaves=lambda: leaves, names=lambda: ["a", "b"]))
    return ServedDataset(
        "train", grows, cast(Any, None), cast(Any, Preparation(None, None, None)), "sets:train", None, None
    )


def ask(served: ServedDataset, number: int | None) -> Preparation:
    """For the shards of that number; None: for those there are. A round of the daemon comes behind it."""
    listing: Any = None if number is None else (("a", f"shard{number}", number + 1, "digest"),)
    found = cast(Any, served._prepared(listing, cast(Any, None)))
    served.advance(cast(Any, None))
    return cast(Preparation, found)


@pytest.mark.parametrize("num_listings", [4, 5, 30])
def test_consumers_in_epochs_of_other_shards_all_get_theirs(served: ServedDataset, num_listings: int):
    asked = [ask(served, number) for number in range(num_listings)]
    served.advance(cast(Any, None))
    for _ in range(3):
        again = [ask(served, number) for number in range(num_listings)]
        assert again == asked and all(each.finished for each in again)


def test_what_nobody_waits_for_is_dropped_and_the_last_ones_are_kept(served: ServedDataset):
    Preparation.held = True
    asked = [ask(served, number) for number in range(10)]
    first = ask(served, 0)
    assert first is asked[0] and not any(each.cancelled for each in asked)
    Preparation.now_s = 100.0
    served.advance(cast(Any, None))
    assert [each for each in asked if not each.cancelled] == [asked[0], *asked[-3:]]


def test_errors_and_the_shards_that_there_are_do_not_last(served: ServedDataset):
    now, failed = ask(served, None), ask(served, 1)
    failed.error = NoShardsError("none")
    served.advance(cast(Any, None))
    assert (ask(served, None), ask(served, 1)) == (now, failed)
    Preparation.now_s = 5.0
    assert ask(served, None) is not now and ask(served, 1) is not failed


def test_who_waits_finds_what_it_has_waited_for(served: ServedDataset):
    """It asks again only every 5 s, and nobody else has had it meanwhile."""
    waited_for = ask(served, None)
    served.advance(cast(Any, None))
    Preparation.now_s = 5.0
    assert waited_for.finished and ask(served, None) is waited_for
    assert ask(served, None) is not waited_for, "what somebody has had lasts only for a moment"


def test_who_waits_hears_why_there_is_nothing(served: ServedDataset):
    failed = ask(served, 1)
    failed.error = NoShardsError("none")
    served.advance(cast(Any, None))
    Preparation.now_s = 5.0
    assert ask(served, 1) is failed and ask(served, 1) is not failed


def test_what_nobody_comes_for_does_not_last(served: ServedDataset):
    """The shards that there were then are not those that there are now."""
    now = ask(served, None)
    served.advance(cast(Any, None))
    Preparation.now_s = 15.0
    assert ask(served, None) is not now


def test_only_so_many_are_prepared_at_a_time(served: ServedDataset):
    Preparation.held = True
    for number in range(16):
        ask(served, number)
    answer, memory = served.data((("a", "shard16", 17, "digest"),), cast(Any, None))
    assert memory is None and answer.why_not == "the server is preparing 16 other listings of data set train"
    assert len(served._listed) == 16
    Preparation.held = False
    ask(served, 0)
    assert ask(served, 16).finished is False and len(served._listed) == 17


def test_an_early_consumer_has_the_same_shards_as_others_in_later_epochs(served: ServedDataset):
    """It came while the server listed them."""
    description = cast(Any, SimpleNamespace(dataset=None, options=None, start=None))
    first, prepare = cast(Any, served.prepare(description, cast(Any, None)))
    assert first.found_before is None
    digests = {"b shards": "1 records in 1 shards, digest 0"}
    cast(Any, served.preparation).data = SimpleNamespace(left_out="", digests=digests)
    served.advance(cast(Any, None))
    assert prepare(None, {}).found_before == [None, ["/fixed/0"]]
