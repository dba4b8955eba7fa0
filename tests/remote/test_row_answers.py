"""What is in an answer to a ticket for rows, and what is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pyarrow import fs

import loaderd
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.formats.shard_index import build_index
from loaderd.gateway.row_answers import ServedSet
from loaderd.options import Shuffle, Storage, StreamOptions
from loaderd.remote.tickets import RowsTicket
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards

RECORDS, BLOCK, BAD, REFUSED = 1300, 1000, 700, 40
UNTOUCHED = 0xEE


def _careful(number: np.ndarray) -> np.ndarray:
    if (number == REFUSED).any():
        raise ValueError("not this one")
    return (2 * number).astype(np.int8)


@pytest.fixture
def served(write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema) -> ServedSet:
    """Of which record BAD is damaged behind the index pass, and a function refuses record REFUSED."""
    (path,) = write_numbered([RECORDS])
    schema = loaderd.Schema(
        numbered_schema.features, {"twice": loaderd.Derived(_careful, ["id"], (), "int8"), **numbered_schema.fields}
    )
    dataset = loaderd.Dataset(path, schema)
    (file,) = list_shards(path)
    index = build_index(file, BLOCK)
    content = bytearray(path.read_bytes())
    offset = 0
    for _ in range(BAD):
        offset += 16 + int.from_bytes(content[offset : offset + 8], "little")
    content[offset + 12 : offset + 14] = b"\xff\xff"
    path.write_bytes(content)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    return ServedSet(
        dataset, LocalData(dataset, StreamOptions(8, shuffle=Shuffle(block_records=BLOCK)), [[file]], lambda _: index)
    )


def made(served: ServedSet, *rows: tuple[int, int, int, int]) -> tuple[np.ndarray, dict[int, str]]:
    """The rows, and what is said of those that could not be had."""
    ticket = RowsTicket("train", served.digest, rows)
    out = np.full((ticket.num_rows, served.row_bytes), UNTOUCHED, np.uint8)
    faults = served.maker.make(ticket, out)
    return out, {number: fault.error["message"] for fault in faults for number in fault.rows}


def test_rows_that_cannot_be_had_are_named_and_zero(served: ServedSet):
    rows, faults = made(served, (0, 1, 0, 300), (0, 0, 0, BLOCK))
    lost = {300 + REFUSED, 300 + BAD}
    assert set(faults) == lost
    assert "not this one" in faults[300 + REFUSED] and f"000.tfrecord: record {REFUSED}, of" in faults[300 + REFUSED]
    assert {number for number in range(len(rows)) if not rows[number].any()} - {300} == lost, "300 is of number 0"


def test_rows_of_which_processes_died_are_named_and_not_made(served: ServedSet):
    """Beside others that cannot be had. The others are made one by one, and each is announced."""
    ticket = RowsTicket("train", served.digest, ((0, 0, REFUSED - 2, REFUSED + 3), (0, 0, BAD, BAD + 2)))
    begun: list[int] = []
    out = np.full((ticket.num_rows, served.row_bytes), UNTOUCHED, np.uint8)
    faults = served.maker.make(ticket, out, [0, 3], begun.append)
    said = {number: fault.error["message"] for fault in faults for number in fault.rows}
    assert sorted(said) == [0, 2, 3, 5] and begun == [1, 2, 4, 6]
    assert "processes of the server died" in said[3] and f"000.tfrecord: record {REFUSED + 1}, of" in said[3]
    whole, _ = made(served, (0, 0, 0, BLOCK))
    assert not out[sorted(said)].any()
    assert out[[1, 4, 6]].tobytes() == whole[[REFUSED - 1, REFUSED + 2, BAD + 1]].tobytes()


def test_a_slow_function_gets_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema
):
    """Before each of its calls, the process shows that it lives."""
    now_s, seconds_a_row = [0.0], [0.0]
    monkeypatch.setattr("loaderd.gateway.row_answers.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    done: list[int | str] = []

    def twice(number: np.ndarray) -> np.ndarray:
        done.append(len(number))
        now_s[0] += seconds_a_row[0] * len(number)
        return (2 * number).astype(np.int8)

    (path,) = write_numbered([RECORDS])
    fields = {"twice": loaderd.Derived(twice, ["id"], (), "int8"), **numbered_schema.fields}
    dataset = loaderd.Dataset(path, loaderd.Schema(numbered_schema.features, fields))
    (file,) = list_shards(path)
    options = StreamOptions(8, shuffle=Shuffle(block_records=BLOCK))
    data = LocalData(dataset, options, [[file]], lambda _: build_index(file, BLOCK))
    slow = ServedSet(dataset, data, lambda: done.append("lives"))
    for seconds, most in ((0.0, 512), (0.3, 3), (0.0, 512), (100.0, 1)):
        seconds_a_row[0] = seconds
        made(slow, (0, 0, 0, BLOCK))
        done.clear()
        made(slow, (0, 0, 0, 600))
        assert max(rows for rows in done[1::2] if isinstance(rows, int)) == most
        assert done[::2] == ["lives"] * (len(done) // 2)


def test_its_files_can_be_closed(served: ServedSet):
    served.close()  # nothing was read
    before = os.listdir("/proc/self/fd")
    made(served, (0, 0, 0, 10))
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    served.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_shards_are_read_from_the_storage_of_the_data_set(
    tmp_path: Path, write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema
):
    write_numbered([20])
    storage = Storage(filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), retry_s=0.0)
    (file,) = list_shards("ours://shards/*.tfrecord", access=Access(storage))
    index = build_index(file, BLOCK, access=Access(storage))
    dataset = loaderd.Dataset("ours://shards/*.tfrecord", numbered_schema, storage=storage)
    data = LocalData(dataset, StreamOptions(8, storage=storage), [[file]], lambda _: index)
    served = ServedSet(dataset, data)
    rows, faults = made(served, (0, 0, 0, 20))
    assert not faults and rows[1:].any(axis=1).all()
    served.close()


def test_an_answer_follows_from_its_ticket_alone(served: ServedSet):
    ranges = (0, 0, 100, 600), (0, 1, 7, 300)
    first, _ = made(served, *ranges)
    made(served, (0, 0, 0, BLOCK))
    again, _ = made(served, *ranges)
    assert first.tobytes() == again.tobytes()
    one_by_one = [
        made(served, (epoch, block, number, number + 1))[0]
        for epoch, block, *both in ranges
        for number in range(*both)
    ]
    assert np.concatenate(one_by_one).tobytes() == first.tobytes()


def test_no_byte_of_an_earlier_answer_is_in_it(served: ServedSet):
    rows, _ = made(served, (0, 1, 0, 200))
    dtype = served.maker._row_dtype
    used = np.zeros(dtype.itemsize, bool)
    for each, offset, *_ in (dtype.fields or {}).values():
        used[offset : offset + each.itemsize] = True
    assert not used.all(), "the rows have gaps"
    assert not rows[:, ~used].any()
