"""Tasks of a worker, on shared memory laid out as the daemon lays it out."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.dataset import Dataset, StreamDescription
from loaderd.errors import (
    CorruptRecordError,
    RecordMismatchError,
    StorageError,
)
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import build_index, decode_indexes
from loaderd.ipc.worker_messages import CheckTask, IndexTask, LoadFault, LoadTask
from loaderd.kernels.crc import framed
from loaderd.options import Shuffle, Storage, StreamOptions
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.batches import BatchPlan, Segment
from loaderd.plan.passes import PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout, WindowLayout
from loaderd.storage.files import list_shards
from loaderd.worker import task_runner
from loaderd.worker.file_rows import FileRows
from loaderd.worker.task_runner import TaskRunner, index_group

Write = Callable[..., list[Path]]

BATCH = 16
WINDOW = 60
NUM_ARENAS = 3
NUM_SLOTS = 2
UNTOUCHED = 0xEE
ACROSS = Segment(0, 50, 57, 2), Segment(1, 0, 9, 0)
"""A batch of two windows, which lie in arenas 2 and 0."""


class Stage:
    """An executor, and the daemon's side of its memory. 170 records make windows of 57, 57 and 56."""

    def __init__(self, paths: list[Path], schema: loaderd.Schema, **more: Any) -> None:
        options = StreamOptions(BATCH, shuffle=Shuffle(WINDOW, 20), remainder="short", **more)
        files = list_shards([str(path) for path in paths])
        indexes = [build_index(file, options.block_records) for file in files]
        self.table = BlockTable(indexes, "raise")
        share = HostShare(EpochRemainder(self.table.num_records), 0, 1, WINDOW)
        self.plan = PassPlan(DatasetRows(self.table.counts, 3, True), BatchPlan(share, BATCH, "short", 1), 3, True, 0)
        self.layout = WindowLayout(schema.row_bytes, share.largest_window)
        self.slot_layout = SlotLayout(schema.specs, BATCH)
        self.windows = SharedMemory.create("windows", NUM_ARENAS * self.layout.arena_bytes)
        self.slots = SharedMemory.create("slots", NUM_SLOTS * self.slot_layout.slot_bytes)
        self.windows.bytes[:] = UNTOUCHED
        self.slots.bytes[:] = UNTOUCHED
        theirs = [SharedMemory(os.dup(memory.fd)) for memory in (self.windows, self.slots)]
        description = StreamDescription(Dataset(paths, schema), options)
        compressions = list(self.table.compressions)
        rows = FileRows(schema, files, compressions)
        self.spent = memoryview(np.zeros(256, dtype=np.int64))
        self.executor = TaskRunner(description, rows, share.largest_window, theirs[0], theirs[1], self.spent)
        for memory in (self.windows, self.slots, *theirs):
            memory.close_fd()

    def load(self, window: int, arena: int) -> list[LoadFault]:
        """Load a window, two slices a task; returns the faults."""
        order = self.plan.order_of(window)
        slices = self.plan.slices_of(window)
        places = [self.table.place(part.block, 3, part.epoch) for part in slices]
        tasks = [
            LoadTask(0, window, arena, 0, order, (*slices[i : i + 2],), (*places[i : i + 2],), i)
            for i in range(0, len(slices), 2)
        ]
        return [fault for task in tasks for fault in self.executor.load(task)]

    def probe(self, any_fits: bool) -> None:
        place = self.table.place(0)
        self.executor.probe(CheckTask(0, 0, place.block.num_records, place, any_fits))

    def numbers(self, window: int) -> list[int]:
        """The planned number of each place of a window: records are numbered through in the order of the blocks."""
        starts = np.cumsum(self.table.counts) - self.table.counts
        rows = [starts[part.block] + i for part in self.plan.slices_of(window) for i in range(part.first, part.stop)]
        found = np.empty(len(rows), dtype=np.int64)
        found[self.plan.order_of(window).places()] = rows
        return found.tolist()

    def slot(self, number: int) -> dict[str, Any]:
        return self.slot_layout.views(self.slots.bytes, number)


def out_of_memory(*_: Any) -> Any:
    raise MemoryError


@pytest.fixture
def stage(write_numbered: Write, numbered_schema: loaderd.Schema) -> Stage:
    return Stage(write_numbered([100, 1, 69]), numbered_schema)


def check_slot(slot: dict[str, Any], expected: list[int]) -> None:
    """The first rows of a slot are those; behind them nothing was written."""
    assert slot["id"][: len(expected)].tolist() == expected
    assert (slot["bits"][: len(expected)] @ 2.0 ** np.arange(31, -1, -1)).tolist() == expected
    for field in slot.values():
        assert set(field[len(expected) :].tobytes()) <= {UNTOUCHED}


@pytest.mark.parametrize("omit", [[], [0], [15], [2, 3, 7], list(range(16)), list(range(7)), list(range(7, 16))])
def test_a_batch_across_arenas_with_rows_left_out(stage: Stage, omit: list[int]):
    stage.load(0, 2)
    stage.load(1, 0)
    stage.executor.fill(1, ACROSS, omit)
    planned = stage.numbers(0)[50:57] + stage.numbers(1)[:9]
    check_slot(stage.slot(1), [number for row, number in enumerate(planned) if row not in omit])
    check_slot(stage.slot(0), [])


def test_rows_that_cannot_be_made_alone_are_found(write_numbered: Write):
    bad: set[int] = set()
    calls: list[int] = []
    tries_ns: list[int] = []
    least, pause_s = 1, 0.0

    def refuse(numbers: Any) -> Any:
        calls.append(len(numbers))
        time.sleep(pause_s)
        found = sorted(bad.intersection(numbers.tolist()))
        if len(found) >= least:
            raise KeyError(found)
        return numbers

    schema = loaderd.Schema(
        {"id": loaderd.Int64()}, {"x": loaderd.Derived(refuse, "id", (), "float32")}, {"id": loaderd.Array("id")}
    )
    shards = write_numbered([170])

    def stage_of(**options: Any) -> tuple[Stage, list[int]]:
        stage = Stage(shards, schema, **options)
        for window, arena in ((0, 2), (1, 0)):
            stage.load(window, arena)
        return stage, stage.numbers(0)[50:57] + stage.numbers(1)[:9]

    def failing(*omit: int, fill_ns: int = 0) -> tuple[list[int], bool]:
        """The rows, each with its own error; and whether these are all."""
        faults, all_faults = stage.executor.row_faults(1, ACROSS, omit, fill_ns, tries_ns.append)
        for row, error in faults.items():
            assert f"KeyError: [{numbers[row]}]" in error.message
        return list(faults), all_faults

    stage, numbers = stage_of(on_corrupt="skip_record")
    for row in range(16):
        bad = {numbers[row], numbers[15]}
        assert failing() == (sorted({row, 15}), True)
    bad = {numbers[3], numbers[12]}
    assert failing(0, 3, 7) == ([12], True)
    bad = set(numbers)
    assert failing(9) == ([row for row in range(16) if row != 9], True)
    assert failing(*range(15)) == ([15], True)
    least = 2
    assert failing() == ([], True), "none fails alone"
    least = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_runner, "MOST_ROW_FAULTS", 5)
        calls.clear()
        assert failing() == ([0], False)
        assert len(calls) < 16
        bad = set(numbers[8:13])
        assert failing() == ([8, 9, 10, 11, 12], True)
    bad, pause_s = {numbers[0]}, 0.3
    calls.clear()
    assert not failing()[1] and len(calls) <= 4, "a second, and the call that was under way"
    stage, numbers = stage_of(on_corrupt="skip_record", stall_timeout=0.2)
    bad, pause_s = {numbers[0]}, 0.1
    tries_ns.clear()
    assert failing(fill_ns=100_000_000) == ([0], True), "not cut short: each attempt is told of"
    assert len(tries_ns) == 8 and min(tries_ns) > 90_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.executor, "fill", out_of_memory)
        assert failing() == ([], False), "no row is to blame"
    stage, numbers = stage_of()
    bad, pause_s = {numbers[3], numbers[12]}, 0.05
    assert failing(fill_ns=10**9) == ([3], False), (
        "where the first one breaks the batch; a slow function has more time"
    )
    assert {*stage.slot(0)["x"].tobytes()} == {UNTOUCHED} != {*stage.slot(1)["x"].tobytes()}, "in its own slot"


def test_memory_that_runs_out_costs_no_record(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """It may be there the next time; the daemon tries it again, as where storage does not answer."""

    with monkeypatch.context() as patch:
        patch.setattr(stage.executor.rows, "load", out_of_memory)
        with pytest.raises(StorageError, match="memory ran out while records were read"):
            stage.load(0, 0)
    assert stage.load(0, 0) == []


def test_suspects_are_decoded_part_by_part_and_count_no_time(write_numbered: Write):
    decoded: list[int] = []

    def remember(numbers: Any) -> Any:
        decoded.extend(numbers.tolist())
        raise KeyError

    schema = loaderd.Schema(
        {"id": loaderd.Int64()}, {"x": loaderd.Derived(remember, "id", (), "float32")}, {"id": loaderd.Array("id")}
    )
    stage = Stage(write_numbered([170]), schema)
    for window, arena in ((0, 2), (1, 0)):
        stage.load(window, arena)
    planned = stage.numbers(0)[50:57] + stage.numbers(1)[:9]
    decoded.clear()
    for row in stage.executor.decode_suspects(1, BatchRange(0, 1, ACROSS, (3, 8), suspects=(2, 5, 6, 7, 15))):
        assert decoded == [planned[before] for before in range(2, row) if before not in (3, 8)]
    assert decoded == [planned[row] for row in range(2, 16) if row not in (3, 8)]
    assert not any(stage.spent)


@pytest.mark.parametrize("any_fits", [False, True])
def test_a_probe_reads_the_first_record(write_numbered: Write, stage: Stage, any_fits: bool):
    stage.probe(any_fits)
    other = loaderd.Schema({"id": loaderd.Float()}, {"id": loaderd.Array("id")})
    wrong = Stage(write_numbered([60], "others"), other)
    with pytest.raises(RecordMismatchError, match=r"record 0 at byte 0: expected .*float"):
        wrong.probe(any_fits)


def test_a_probe_of_many_finds_the_one_that_fits(write_numbered: Write, numbered_schema: loaderd.Schema):
    (path,) = write_numbered([1])
    empty = framed(b"")
    path.write_bytes(empty + empty + path.read_bytes() + empty)
    stage = Stage([path], numbered_schema)
    stage.probe(True)
    with pytest.raises(RecordMismatchError, match="record 0 at byte 0"):
        stage.probe(False)


def test_a_shard_with_more_damage_than_a_message_holds_is_refused(
    write_numbered: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (path,) = write_numbered([100])
    for record in range(30):
        loaderd.testing.damage(path, record=record)
    (file,) = list_shards(str(path))
    task = IndexTask((file,), IndexCache(str(tmp_path / "cache"), 30), pickle.dumps(Storage()))
    damages = build_index(file, 30).damage_bytes
    monkeypatch.setattr(task_runner, "_MOST_DAMAGE_BYTES", damages - 1)
    for _ in range(2):  # it is not kept either
        with pytest.raises(CorruptRecordError, match=f"^30 records of one shard .* the first is {path}: record 0 at"):
            index_group(task)
    monkeypatch.setattr(task_runner, "_MOST_DAMAGE_BYTES", damages)
    assert len(decode_indexes(index_group(task).encoded)[0].damages) == 30
