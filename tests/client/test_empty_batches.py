"""Batches of which ``on_corrupt`` leaves no record: left out, counted, and passed over where batches are counted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaderd_tf
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import EmptyBatchError, ShardError
from loaderd.kernels.crc import framed
from tests.helpers import restarted
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import MODULE, Restarted

Write = Callable[..., list[Path]]
OPTIONS: dict[str, Any] = {"batch_size": 10, "shuffle": False, "workers": 1, "on_corrupt": "skip_any"}


def emptied(write_numbered: Write, counts: list[int], *numbers: int) -> list[Path]:
    """Shards, some of which hold records without a feature."""
    shards = write_numbered(counts)
    for number in numbers:
        shards[number].write_bytes(counts[number] * framed(b""))
    return shards


@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loop_in_which_nothing_is_left_ends(numbered: Numbered, epochs: int | None, ahead: int):
    """Else one over data without an end would go on for ever, without a word."""
    shards = numbered.write([50, 50])
    with numbered.loader(shards, epochs=epochs, **OPTIONS) as loader:
        for shard in shards:
            os.truncate(shard, 7)
        batches = loader._iterate(ahead=ahead)
        said = "no record is left of 10 batches in a row, as many as an epoch has; at last, none of the 10 records of"
        with pytest.raises(ShardError, match=said):
            next(batches)
        assert loader.statistics().records_skipped in range(100, 101 + 300 * (ahead > 0), 100), "more are read ahead"
        if epochs is None:  # and each time that it is asked again
            with pytest.raises(ShardError, match=said):
                next(batches)


def test_a_host_takes_no_step_less_than_the_others(numbered: Numbered):
    shards = emptied(numbered.write, [20, 20, 20, 20], 1)
    with numbered.loader(shards, shard=(0, 2), **OPTIONS) as loader:
        batches, found = iter(loader), []
        for _ in range(4):
            try:
                found.append(len(next(batches)["id"]))
            except ShardError as error:
                assert not isinstance(error, EmptyBatchError)
                assert "this host would take a step less than the other ones of 2" in str(error)
                found.append(0)
        assert sorted(found) == [0, 0, 10, 10] and not list(batches)


@pytest.mark.parametrize("way", ["fetch", "tf.data"])
def test_counted_batches_lead_to_the_right_position(numbered: Numbered, way: str):
    shards = emptied(numbered.write, [20, 20, 20, 20, 20], 1, 4)
    expected = [list(range(first, first + 10)) for first in (0, 10, 40, 50, 60, 70)]

    def taken(loader: loaderd.Loader, most: int) -> list[list[int]]:
        if way == "tf.data":
            return [ids.numpy().tolist() for ids in loaderd_tf.from_loader(loader, "id").take(most)]
        found: list[list[int]] = []
        pass_, step = loader._new_pass()
        while len(found) < most:
            with contextlib.suppress(EmptyBatchError):
                batch = loader._fetch(pass_, step)
                if batch is None:
                    break
                found.append(batch["id"].tolist())
            step += 1
        return found

    for count in range(7):
        with numbered.loader(shards, **OPTIONS) as loader:
            begin = loader.next_position()
            assert taken(loader, count) == expected[:count]
            there = loader.after(begin, count)
        with numbered.loader(shards, start=there, **OPTIONS) as loader:
            if count < 6:
                assert taken(loader, 6) == expected[count:]


def test_an_iterator_of_tensorflow_is_restored_behind_them(numbered: Numbered, tmp_path: Path):
    shards = emptied(numbered.write, [20, 20, 20], 1)
    for count in range(5):
        with contextlib.ExitStack() as opened:
            loaders = [opened.enter_context(numbered.loader(shards, **OPTIONS)) for _ in range(2)]
            first, second = (iter(loaderd_tf.from_loader(loader, "id")) for loader in loaders)
            for _ in range(count):
                next(first)
            path = tf.train.Checkpoint(iterator=first).write(f"{tmp_path}/{count}")
            tf.train.Checkpoint(iterator=second).read(path)
            assert [ids.numpy()[0] for ids in second] == [0, 10, 40, 50][count:]


def test_groups_leave_them_out(tmp_path: Path, numbered: Numbered, monkeypatch: pytest.MonkeyPatch):
    emptied(numbered.write, [20, 20, 20, 20], 1, 2)
    order = "loaderd.Shuffle(window_records=60, block_records=10), seed=3"
    monkeypatch.setattr(restarted, "MODULE", MODULE.replace(order, 'shuffle=False, on_corrupt="skip_any"'))
    server = Restarted(tmp_path)
    found: list[list[int]] = []
    try:
        with contextlib.ExitStack() as opened:
            loaders = [opened.enter_context(server.connect(10, sharing="mirrored", consumers=2)) for _ in range(2)]

            def consume(loader: loaderd.Loader) -> None:
                found.extend(batch["id"].tolist() for batch in loader)

            other = threading.Thread(target=consume, args=[loaders[1]])
            other.start()
            consume(loaders[0])
            other.join()
            expected = [list(range(first, first + 10)) for first in (0, 10, 60, 70)]
            assert sorted(found) == sorted(2 * expected)
            skipped = [loader.statistics().records_skipped for loader in loaders]
            assert sum(skipped) == 80
    finally:
        server.kill()
