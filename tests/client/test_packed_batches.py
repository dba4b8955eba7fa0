"""Packed batches (``unpack="device"``) keep the promises of unpacked ones; numpy makes the fields of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import loaderd
from loaderd.errors import ServerError
from tests.helpers.device_program import unpacked
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import all_workers_of, kill, newest_daemon
from tests.helpers.restarted import Restarted


def numbers(loader: loaderd.Loader, batches: Any) -> list[list[int]]:
    return [Numbered.check(batch) for batch in unpacked(loader, batches)]


@pytest.fixture
def expected(numbered: Numbered) -> list[list[int]]:
    with numbered.loader([100, 50], epochs=2) as loader:
        return numbered.batches(loader)


def test_an_iteration_goes_on_from_every_step(numbered: Numbered, expected: list[list[int]]):
    options: dict[str, Any] = {"epochs": 2, "unpack": "device"}
    with numbered.loader([100, 50], **options) as loader:
        assert next(iter(loader))["bits (stored)"].shape == (10, 4)
        loader.load_state_dict(loaderd.Position())
        positions, found = [loader.position], []
        for batch in loader:
            found += numbers(loader, [batch])
            positions.append(loader.position)
        assert found == expected
        for step, position in enumerate(positions[:-1]):
            loader.load_state_dict(position)
            assert numbers(loader, loader) == expected[step:]
    with numbered.loader([100, 50], start=positions[17], epochs=2) as loader:
        assert numbered.batches(loader) == expected[17:], "a position is the same for floats"


def test_processes_that_are_killed(numbered: Numbered, expected: list[list[int]]):
    with numbered.loader([100, 50], epochs=2, unpack="device") as loader:
        found, held = [], []
        for step, batch in enumerate(loader):
            found += numbers(loader, [batch])
            held.append(batch)
            if step in (3, 16):
                kill(*all_workers_of(newest_daemon(), 1))
            if step in (9, 22):
                kill(newest_daemon())
        assert found == expected == numbers(loader, held)
        assert loader.statistics().daemon_restarts == 2


@pytest.mark.parametrize("held_batches", [1, 4])
def test_batches_that_are_kept_stay_what_they_are(numbered: Numbered, expected: list[list[int]], held_batches: int):
    with numbered.loader([100, 50], epochs=2, unpack="device", held_batches=held_batches) as loader:
        kept = list(loader)
        assert numbers(loader, kept) == expected
        assert loader.statistics().batches_copied == 30 - held_batches


# ----------------------------------------------------------------------------------------- of a server


def test_a_server_that_is_killed(server: Restarted, embedded: Any):
    with server.connect(epochs=2, unpack="device") as loader:
        assert loader._options.unpack == "device" and list(loader.schema.fields) == ["bits (stored)", "id"]
        found = []
        for step, batch in enumerate(loader):
            found += numbers(loader, [batch])
            if step in (3, 11):
                server.kill_daemon()
        assert found == embedded(epochs=2) and loader.statistics().daemon_restarts


def test_a_group_of_a_server(server: Restarted, embedded: Any):
    group: dict[str, Any] = {"sharing": "mirrored", "consumers": 2}
    with server.connect(unpack="device", **group) as one:
        with pytest.raises(ServerError, match="unpack 'worker' instead of 'device'"):
            server.connect(**group)
        with server.connect(unpack="device", **group) as other, ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda loader: numbers(loader, loader), (one, other)))
    assert found == [embedded()] * 2


# ------------------------------------------------------------------------------------- random symmetries


def test_boards_are_turned_as_workers_turn_them(numbered: Numbered):
    """The number of each record's symmetry travels, a byte; other records get it, and another one in each epoch."""
    fields = {
        "board": loaderd.board_symmetry("bits", (4, 4), dtype="float16"),
        "policy": loaderd.board_symmetry("moves", (17,)),
        "id": loaderd.Array("id"),
    }
    intermediates = {
        "bits": loaderd.Bits("bits", (4, 4), start=16, dtype="int8"),
        "moves": loaderd.Bits("bits", (17,), start=15),
    }
    schema = loaderd.Schema(numbered.schema.features, fields, intermediates)
    shards, options = numbered.write([100, 50]), {"batch_size": 10, "epochs": 2}
    with (
        loaderd.Loader(shards, schema, workers=1, **options) as plain,
        loaderd.Loader(shards, schema, workers=2, unpack="device", **options) as packed,
    ):
        assert list(packed.schema.fields) == ["bits (stored)", "symmetry (drawn)", "id"]
        turned: dict[int, set[bytes]] = {}
        for ours, theirs in zip(unpacked(packed, packed), plain, strict=True):
            for name in fields:
                assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes()
            for number, board in zip(ours["id"].tolist(), ours["board"], strict=True):
                turned.setdefault(number, set()).add(board.tobytes())
    assert len(turned) == 150 and sum(len(boards) == 2 for boards in turned.values()) > 75
