"""Loading parts of blocks into a window: against the plain parser, and with things wrong in every place."""

from __future__ import annotations

import gzip
import os
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderd
from loaderd.decode.example import Example, parse_example
from loaderd.errors import CorruptRecordError, LoaderdError, RecordMismatchError, ShardReadError
from loaderd.formats.blocks import Block, BlockReader
from loaderd.formats.shard_index import ShardIndex, build_index
from loaderd.kernels.crc import framed
from loaderd.plan.permutation import random_words
from loaderd.storage.files import list_shards
from loaderd.worker.window_loader import BlockPlacement, WindowLoader

Write = Callable[..., list[Path]]
UNTOUCHED = 0xEE


def payloads(path: Path) -> list[bytes]:
    """The records of a shard, with no check at all."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    found, offset = [], 0
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 8], "little")
        found.append(data[offset + 12 : offset + 12 + length])
        offset += length + 16
    return found


def plain_row(payload: bytes, schema: loaderd.Schema) -> bytes:
    parsed = parse_example(payload, schema.features)
    assert isinstance(parsed, Example)
    row = bytearray(schema.row_bytes)
    fields = schema.row_dtype.fields
    assert fields is not None
    for name, value in parsed.values.items():
        row[fields[name][1] : fields[name][1] + len(value.data)] = value.data
    return bytes(row)


def change(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a shard so that size and time say nothing of it."""
    times = os.stat(path)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Shards:
    """Indexed shards, the loader that reads them, and what the plain parser makes of their records."""

    def __init__(self, paths: Sequence[Path], schema: loaderd.Schema, block_records: int) -> None:
        self.schema = schema
        self.files = list_shards([str(path) for path in paths])
        self.indexes = [build_index(file, block_records) for file in self.files]
        self.blocks = [block for number, index in enumerate(self.indexes) for block in blocks_of(number, index)]
        self.rows = [[plain_row(payload, schema) for payload in payloads(path)] for path in paths]
        self.loader = WindowLoader(schema, self.files, [index.compression for index in self.indexes])

    def window(self, size: int) -> np.ndarray:
        return np.full((size, self.schema.row_bytes), UNTOUCHED, dtype=np.uint8)

    def expected(self, parts: Sequence[BlockPlacement], size: int, bad: Sequence[int] = ()) -> np.ndarray:
        """The window after a load; places in ``bad`` are untouched."""
        window = self.window(size)
        for part in parts:
            for number, place in enumerate(part.places.tolist(), part.block.first_record):
                if place >= 0 and place not in bad:
                    window[place] = np.frombuffer(self.rows[part.block.shard][number], dtype=np.uint8)
        return window


def blocks_of(shard: int, index: ShardIndex) -> list[Block]:
    return [Block(shard, *index.block(number)) for number in range(len(index.counts))]


def whole(block: Block, start: int) -> BlockPlacement:
    """All of a block, its rows backwards from place ``start + count - 1``."""
    return BlockPlacement(block, np.arange(start, start + block.num_records)[::-1])


@given(
    data=st.data(), block_records=st.integers(1, 90), compress=st.sampled_from([None, gzip.compress, zlib.compress])
)
def test_rows_are_those_of_the_plain_parser(
    write_numbered: Write, numbered_schema: loaderd.Schema, data: st.DataObject, block_records: int, compress: object
):
    paths = write_numbered([70, 3, 140])
    shards = Shards(paths, numbered_schema, block_records)
    if callable(compress):
        # The rows were taken from the plain shards; one shard of the three is compressed now.
        paths[2].write_bytes(compress(paths[2].read_bytes()))
        files = list_shards([str(path) for path in paths])
        index = build_index(files[2], block_records)
        shards.blocks = [block for block in shards.blocks if block.shard != 2] + blocks_of(2, index)
        shards.loader = WindowLoader(numbered_schema, files, ["none", "none", index.compression])
    chosen = data.draw(st.lists(st.sampled_from(shards.blocks), min_size=1, max_size=6, unique=True))
    size = sum(block.num_records for block in chosen) + 5
    places = np.array(data.draw(st.permutations(range(size))), dtype=np.intp)
    parts = []
    for block in chosen:
        wanted = data.draw(
            st.lists(st.booleans(), min_size=block.num_records, max_size=block.num_records) | st.none()
        )
        own = places[: block.num_records]
        parts.append(BlockPlacement(block, own if wanted is None else np.where(wanted, own, -1)))
        places = places[block.num_records :]
    window = shards.window(size)
    for _ in range(2):  # the second time by the layouts learnt in the first, over rows that are there already
        assert shards.loader.load(parts, window) == []
        assert np.array_equal(window, shards.expected(parts, size))


def faults_of(faults: list[tuple[list[int], LoaderdError]]) -> dict[int, LoaderdError]:
    """The error of each place."""
    found: dict[int, LoaderdError] = {}
    for places, error in faults:
        assert not set(places) & set(found)
        found.update(dict.fromkeys(places, error))
    return found


@pytest.mark.parametrize("where", [0, 30])
@pytest.mark.parametrize("record", [0, 39, 40, 77, 98])
def test_a_damaged_record_costs_its_place_alone(
    write_numbered: Write, numbered_schema: loaderd.Schema, record: int, where: int
):
    """In its frame, or in what it holds."""
    paths = write_numbered([100, 100])
    shards = Shards(paths, numbered_schema, 40)
    offset = sum(len(payload) + 16 for payload in payloads(paths[1])[:record])
    change(paths[1], offset + where, b"\xff")
    parts = [whole(block, start) for block, start in zip(shards.blocks, (0, 40, 80, 100, 140, 180), strict=True)]
    window = shards.window(200)
    faults = faults_of(shards.loader.load(parts, window))
    (place,) = faults
    (part,) = [part for part in parts if place in part.places]
    number = part.block.first_record + part.places.tolist().index(place)
    assert (part.block.shard, number) == (1, record)
    damage = faults[place].damage
    assert isinstance(faults[place], CorruptRecordError) and damage is not None
    assert (damage.shard, damage.record, damage.offset) == (str(paths[1]), record, offset)
    assert np.array_equal(window, shards.expected(parts, 200, bad=[place]))


@pytest.mark.parametrize("compress", [None, gzip.compress])
def test_a_record_that_does_not_fit_costs_its_place_alone(
    write_numbered: Write, numbered_schema: loaderd.Schema, compress: object
):
    paths = write_numbered([100])
    records = payloads(paths[0])
    rows = [plain_row(payload, numbered_schema) for payload in records]
    records[33] = records[33].replace(b"bits", b"bats")
    content = b"".join(map(framed, records))
    paths[0].write_bytes(compress(content) if callable(compress) else content)
    files = list_shards(str(paths[0]))
    index = build_index(files[0], 40)
    loader = WindowLoader(numbered_schema, files, [index.compression])
    anchored = blocks_of(0, index) if not callable(compress) else [Block(0, 0, len(content), 100, 0, b"")]
    parts = [BlockPlacement(block, block.first_record + np.arange(block.num_records)) for block in anchored]
    window = np.zeros((100, numbered_schema.row_bytes), dtype=np.uint8)
    faults = faults_of(loader.load(parts, window))
    error = faults[33]
    assert list(faults) == [33] and isinstance(error, RecordMismatchError) and error.damage is not None
    offset = sum(len(payload) + 16 for payload in records[:33])
    assert (error.damage.record, error.damage.offset) == (33, offset)
    assert "expected feature 'bits'" in error.message and "bats" in error.message
    assert "give the feature a default" in error.hint
    rows[33] = bytes(len(rows[33]))
    assert window.tobytes() == b"".join(rows)


def test_a_shard_that_cannot_be_read_costs_its_own_places(write_numbered: Write, numbered_schema: loaderd.Schema):
    paths = write_numbered([50, 50, 50])
    shards = Shards(paths, numbered_schema, 50)
    os.remove(paths[0])
    paths[1].write_bytes(paths[1].read_bytes()[:-10])
    parts = [whole(block, 50 * number) for number, block in enumerate(shards.blocks)]
    window = shards.window(150)
    faults = faults_of(shards.loader.load(parts, window))
    assert sorted(faults) == list(range(100))
    assert all(isinstance(error, ShardReadError) for error in faults.values())
    assert "No such file" in str(faults[0]) and "changed while it was in use" in str(faults[50])
    assert np.array_equal(window, shards.expected(parts, 150, bad=range(100)))


@pytest.mark.parametrize("how", ["together", "data", "frame", "compressed"])
def test_rows_hold_the_keys_of_their_records(write_numbered: Write, numbered_schema: loaderd.Schema, how: str):
    paths = write_numbered([100, 100])
    offset = sum(len(payload) + 16 for payload in payloads(paths[1])[:61])
    if how == "compressed":
        for path in paths:
            path.write_bytes(gzip.compress(path.read_bytes()))
    fields = {**numbered_schema.fields, "x": loaderd.Derived(lambda random: random.random(), (), random=True)}
    schema = loaderd.Schema(numbered_schema.features, fields)
    shards = Shards(paths, schema, 90)
    if how in ("data", "frame"):
        change(paths[1], offset + (30 if how == "data" else 0), b"\xff")
    part_keys = [7, 2**64 - 1]
    parts = []
    for number, block in enumerate(shards.blocks):
        numbers = np.arange(block.num_records)
        places = np.where(numbers % 3, 100 * number + numbers[::-1], -1)
        parts.append(BlockPlacement(block, places, part_keys[block.shard]))
    window = shards.window(600)
    faults = faults_of(shards.loader.load(parts, window))
    assert len(faults) == (how in ("data", "frame"))
    window[list(faults)] = UNTOUCHED
    expected = shards.expected(parts, 600, bad=list(faults))
    for part in parts:
        for record, place in enumerate(part.places.tolist(), part.block.first_record):
            if place >= 0 and place not in faults:
                schema.record_keys(expected)[place] = random_words(part.key, record + 1)[record]
    assert np.array_equal(window, expected)


def test_many_blocks_for_few_records_are_read_in_groups(
    write_numbered: Write, numbered_schema: loaderd.Schema, monkeypatch: pytest.MonkeyPatch
):
    """Or a task of 4,096 records, one of each block, would bring a GB into memory."""
    shards = Shards(write_numbered([2000]), numbered_schema, 20)
    parts = [
        BlockPlacement(block, np.where(np.arange(block.num_records) == 7, number, -1))
        for number, block in enumerate(shards.blocks)
    ]
    most = 5 * max(block.num_bytes for block in shards.blocks)
    monkeypatch.setattr(BlockReader, "most_together_bytes", most)
    read_together, sizes = BlockReader.read_together, []

    def read(reader: BlockReader, blocks: list[Block]) -> Any:
        sizes.append(sum(block.num_bytes for block in blocks))
        return read_together(reader, blocks)

    monkeypatch.setattr(BlockReader, "read_together", read)
    window = shards.window(100)
    assert shards.loader.load(parts, window) == []
    assert np.array_equal(window, shards.expected(parts, 100))
    assert max(sizes) <= most and len(sizes) < len(parts) / 3


def test_rows_that_nobody_wants_need_no_room(tmp_path: Path):
    """Those of a thousand records that are tried may be gigabytes."""
    schema = loaderd.Schema({"a": loaderd.Int64(1 << 17, default=0)}, {"a": loaderd.Array("a")})
    path = tmp_path / "a"
    path.write_bytes(framed(b"") * 50)
    files = list_shards(str(path))
    (block,) = blocks_of(0, build_index(files[0], 50))
    loader = WindowLoader(schema, files, ["none"])
    tracemalloc.start()
    try:
        loader.check_fits(block, np.arange(50))
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
