"""Copies to a GPU: out of the slots themselves, and no slot is filled again before its copy is over."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import loaderd
from tests.helpers.lent_batches import Write
from tests.helpers.own_processes import newest_daemon

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
loaderd_torch = pytest.importorskip("loaderd_torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here that PyTorch can use")

RECORDS, BATCH_SIZE = 20_000, 500
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Write) -> list[Path]:
    return write_numbered_to(tmp_path_factory.mktemp("shards"), [RECORDS // 2] * 2)


@pytest.fixture
def loader(shards: list[Path]) -> Iterator[loaderd.Loader]:
    with loaderd.Loader(shards, SCHEMA, batch_size=BATCH_SIZE, workers=2) as loader:
        yield loader
        gc.collect()
        assert loader.statistics().slots_lent == 0


def check(bits: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """That all rows are whole; returns their numbers."""
    numbers: list[int] = ids.tolist()
    assert (bits.double().cpu() @ 2.0 ** torch.arange(31, -1, -1).double()).tolist() == numbers
    return numbers


def in_the_way(size: int = 256 << 20) -> None:
    """Have the GPU copy something else first: what is asked for from now on waits for some milliseconds."""
    with torch.cuda.stream(_OTHER[0]):
        _OTHER[1][:size].copy_(_OTHER[2][:size], non_blocking=True)


@pytest.fixture(scope="module", autouse=True)
def other_copies() -> Iterator[None]:
    host = torch.zeros(256 << 20, dtype=torch.uint8).pin_memory()
    _OTHER[:] = torch.cuda.Stream(), torch.empty_like(host, device="cuda"), host
    yield
    torch.cuda.synchronize()
    _OTHER.clear()


_OTHER: list = []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_batch_is_overwritten_while_it_is_copied(loader: loaderd.Loader, prefetch: int):
    """The copies wait for another one, the loop's stream for its computations, and the loop for nothing."""
    seen, busy = [], torch.ones(4000, 4000, device="cuda")
    for _ in range(3):
        for bits, ids in loaderd_torch.batches(loader, ("bits", "id"), device="cuda", prefetch=prefetch):
            in_the_way()
            busy @= busy / 4000
            assert bits.device.type == "cuda" and loader.statistics().slots_lent <= loader._options.held_batches
            seen.append((bits * 1, ids * 1))
    assert sorted(n for element in seen for n in check(*element)) == sorted([*range(RECORDS)] * 3)


def test_what_is_begun_when_an_iteration_ends_is_copied(loader: loaderd.Loader):
    kept = []
    for _ in range(20):
        in_the_way()
        kept.append(next(iter(loaderd_torch.batches(loader, ("bits", "id"), device="cuda", prefetch=1))))
        for _ in loader:  # other batches come into the slots
            pass
    assert all(len(set(check(*element))) == BATCH_SIZE for element in kept)


def test_slots_are_pinned_and_what_lies_there_is_copied_for_others(loader: loaderd.Loader):
    first = next(iter(loader))
    assert not first._is_pinned
    on_host = next(iter(loaderd_torch.batches(loader, "bits")))
    assert not on_host.is_pinned()
    next(iter(loaderd_torch.batches(loader, "bits", device="cuda")))
    assert first._is_pinned and on_host.is_pinned()
    assert not next(iter(loaderd_torch.batches(loader, "bits"))).is_pinned()
    del first, on_host


def test_the_memory_of_the_next_daemon_is_pinned(loader: loaderd.Loader, caplog: pytest.LogCaptureFixture):
    """And that of the one before can be used for something else."""
    seen: list[int] = []
    with caplog.at_level(logging.WARNING):
        for number, (bits, ids) in enumerate(loaderd_torch.batches(loader, ("bits", "id"), device="cuda")):
            if number in (5, 20):
                os.kill(newest_daemon(), signal.SIGKILL)
            seen += check(bits, ids)
    assert sorted(seen) == list(range(RECORDS)) and loader.statistics().daemon_restarts == 2
    assert not [record for record in caplog.records if "pin" in record.message]
    assert next(iter(loader))._is_pinned
