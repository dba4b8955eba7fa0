"""From the shards of a data set to its data, without workers: what a preparation says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import loaderd
from loaderd.daemon.indexing import local_preparation
from loaderd.daemon.indexing.local_preparation import LocalPreparation
from loaderd.errors import StorageError
from loaderd.options import StreamOptions


def test_the_age_of_a_failed_listing_counts_from_its_end(monkeypatch: pytest.MonkeyPatch):
    """A server hands an error out for so long; and who waits for the data comes only later."""
    now_s = 100.0
    monkeypatch.setattr(local_preparation, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr("loaderd.daemon.indexing.preparation.time", local_preparation.time)
    worker_manager: Any = SimpleNamespace(
        stall_timeout=None,
        scheduler=SimpleNamespace(add_source=lambda _: None, remove_source=lambda _: None),
        start=lambda _: None,
        silent=lambda *_: None,
        outage=lambda _: None,
    )
    dataset = loaderd.Dataset("s3://bucket/*", loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")}))
    preparation = LocalPreparation(dataset, StreamOptions(1), worker_manager)
    now_s = 103.0
    preparation.advance()
    assert not preparation.finished and preparation.age_s == 0.0
    assert preparation.list_pass is not None
    preparation.list_pass.error = StorageError("storage refuses")
    preparation.advance()
    assert preparation.error is not None and preparation.age_s == 0.0
    now_s = 104.0
    assert preparation.age_s == 1.0
