"""How long it is worth to go on trying, and what a server may not change meanwhile: without a server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client.served_source import ServedSource
from loaderd.client.transport import TransportLost
from loaderd.errors import BusyError, CorruptRecordError, NoShardsError, OptionError, ServerError, StorageError
from loaderd.ipc.messages import Welcome
from loaderd.ipc.subscription import Subscription
from loaderd.schema.wire import to_wire
from tests.helpers.numbered import Numbered

LOST = TransportLost("it is gone")
NO_SHARDS = NoShardsError("/data/*.tfrecord matches no file", hint="There is no folder /data.")


def make(address: str = "unix:///s", **options: Any) -> ServedSource:
    chosen: dict[str, Any] = {"stall_timeout": 1.0, "report": None, "reconnect_timeout": 30.0}
    return ServedSource(address, "train", Subscription(10, **options), **chosen)


def welcome(schema: loaderd.Schema, **changes: Any) -> Welcome:
    known = {"row_bytes": 12, "shuffle": [60, 10], "seed": 3, "on_corrupt": "raise", "grows": False}
    return Welcome("1", {"schema": to_wire(schema), **known, **changes})


def test_a_relative_address_stays_the_same_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        server.listen()
        source = make("unix:s")
        monkeypatch.chdir("/")
        source.connect().close()


def test_pauses_grow_until_it_is_enough(numbered: Numbered, caplog: pytest.LogCaptureFixture):
    source = make()
    source.welcomed(welcome(numbered.schema))
    for _ in range(2):  # after an error, it can be tried as long once more
        pauses = []
        with pytest.raises(ServerError, match="it is gone; it was called for 30 s, and no batch came"):
            while True:
                pauses.append(source.pause_s(LOST, False))
        for number, pause_s in enumerate(pauses):
            most_s = min(5.0, 0.1 * 2**number)
            assert most_s / 2 <= pause_s <= most_s
        assert 30 <= sum(pauses) < 35
    source.is_back()
    source.is_back()
    assert [record.message for record in caplog.records] == [
        "it is gone; calling it for up to 30 s",
        "the server at unix:///s is back",
    ]


def test_a_batch_that_came_ends_the_outage(numbered: Numbered):
    """But not that the server was back: else one that dies whenever it is asked would be asked for ever."""
    source = make()
    source.welcomed(welcome(numbered.schema))
    for _ in range(10):
        last_s = source.pause_s(LOST, False)
        source.welcomed(welcome(numbered.schema))
        source.is_back()
    assert last_s > 2
    assert source.pause_s(LOST, True) <= 0.1


def test_who_was_never_reached_is_not_called_again():
    with pytest.raises(ServerError, match="it is gone\nIs it running"):
        make().pause_s(LOST, False)


def test_what_a_server_that_is_back_may_lack_for_a_while(numbered: Numbered):
    source = make()
    source.welcomed(welcome(numbered.schema))
    assert not source.may_retry(NO_SHARDS), "the first time, it is more likely a mistake"
    source.is_back()
    passing = (NO_SHARDS, StorageError("storage is away"), BusyError("it is full"))
    final = (ServerError("there is no such data set"), CorruptRecordError("a record is damaged"))
    assert [source.may_retry(failure) for failure in (*passing, *final)] == [True] * 3 + [False] * 2


def test_what_follows_from_the_welcome(numbered: Numbered):
    source = make(remainder="drop", epochs=3)
    source.welcomed(welcome(numbered.schema))
    assert source.window_records == 60 and source.options.block_records == 10
    assert (source.options.seed, source.options.epochs, source.options.remainder) == (3, 3, "drop")
    assert source.schema.specs == numbered.schema.specs
    for changes in ({"seed": 4}, {"shuffle": False}, {"grows": True}, {"row_bytes": 13}):
        with pytest.raises(ServerError, match=f"another data set 'train' now: another {next(iter(changes))}"):
            source.welcomed(welcome(numbered.schema, **changes))
    source.welcomed(welcome(numbered.schema))
    with pytest.raises(OptionError, match="carry"):
        make(remainder="carry").welcomed(welcome(numbered.schema, grows=True))
