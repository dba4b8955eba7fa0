"""What is in an answer to a ticket for rows, and what is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.formats.shard_index import build_index
from loaderd.options import Shuffle, StreamOptions
from loaderd.schema.packed import unpacking_schema
from loaderd.serve.row_maker import RowMaker
from loaderd.storage.access import Access, no_callback
from loaderd.storage.files import list_shards

RECORDS, BLOCK, BAD, REFUSED = 1300, 1000, 700, 40


def _careful(number: np.ndarray) -> np.ndarray:
    if (number == REFUSED).any():
        raise ValueError("not this one")
    return (2 * number).astype(np.int8)


@pytest.fixture
def maker(write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema) -> RowMaker:
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
    options = StreamOptions(8, shuffle=Shuffle(block_records=BLOCK))
    return RowMaker(dataset, LocalData(dataset, options, [[file]], {None: {file: index}}), Access())


def made(maker: RowMaker, *ranges: tuple[int, int, int, int]) -> tuple[np.ndarray, dict[int, str]]:
    """The rows, and what is said of those that could not be had."""
    rows, faults = maker.make(np.array(ranges), no_callback)
    return rows, {number: fault.error["message"] for fault in faults for number in fault.rows}


def test_rows_that_cannot_be_had_are_named_and_zero(maker: RowMaker):
    rows, faults = made(maker, (0, 1, 0, 300), (0, 0, 0, BLOCK))
    lost = {300 + REFUSED, 300 + BAD}
    assert set(faults) == lost
    assert "not this one" in faults[300 + REFUSED] and f"000.tfrecord: record {REFUSED}, of" in faults[300 + REFUSED]
    assert {number for number in range(len(rows)) if not rows[number].any()} - {300} == lost, "300 is of number 0"


def test_a_row_of_which_processes_died_is_named_and_not_made(maker: RowMaker):
    rows, (fault,) = maker.make(np.array([(0, 0, 7, 8)]), no_callback, is_lost=True)
    assert fault.rows == [0] and not rows.any()
    assert "processes of the server died" in fault.error["message"]
    assert "000.tfrecord: record 7, of" in fault.error["message"]


def test_an_answer_follows_from_its_ticket_alone(maker: RowMaker):
    ranges = (0, 0, 100, 600), (0, 1, 7, 300)
    first, _ = made(maker, *ranges)
    made(maker, (0, 0, 0, BLOCK))
    again, _ = made(maker, *ranges)
    assert first.tobytes() == again.tobytes()
    single = [
        (epoch, block, number, number + 1) for epoch, block, begin, end in ranges for number in range(begin, end)
    ]
    order = np.random.default_rng(1).permutation(len(single))
    rows, _ = made(maker, *[single[number] for number in order])
    assert rows.tobytes() == first[order].tobytes()


def test_no_byte_of_an_earlier_answer_is_in_it(maker: RowMaker, numbered_schema: loaderd.Schema):
    rows, _ = made(maker, (0, 1, 0, 200))
    fields = {"twice": loaderd.Derived(_careful, ["id"], (), "int8"), **numbered_schema.fields}
    dtype = unpacking_schema(loaderd.Schema(numbered_schema.features, fields)).row_dtype
    used = np.zeros(dtype.itemsize, bool)
    for each, offset, *_ in (dtype.fields or {}).values():
        used[offset : offset + each.itemsize] = True
    assert not used.all(), "the rows have gaps"
    assert not rows[:, ~used].any()


def test_work_that_nobody_waits_for_is_stopped(maker: RowMaker):
    class Gone(Exception):
        pass

    asked: list[None] = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 3:
            raise Gone

    with pytest.raises(Gone):
        maker.make(np.array([(0, 0, 0, 600)]), check)
    rows, _ = made(maker, (0, 0, 100, 200))
    assert rows.any(axis=1).all(), "it can make others"


def test_its_files_can_be_closed(maker: RowMaker):
    maker.close()  # nothing was read
    before = os.listdir("/proc/self/fd")
    made(maker, (0, 0, 0, 10))
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    maker.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
