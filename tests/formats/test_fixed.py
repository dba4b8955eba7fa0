"""Records of fixed size, however a shard wraps them: blocks, damage at the index pass and behind it, errors."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import Damage, SchemaError, ShardReadError
from loaderd.formats import fixed_blocks, fixed_index, inflate, npz
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.shard_index import ShardIndex, decode_indexes, encode_indexes
from loaderd.storage.shard_file import Block, ShardFile
from loaderd.worker.window_loader import BlockPlacement, WindowLoader
from tests.formats.shard_bytes import make_shard, overwrite
from tests.helpers.evil_npz import npy
from tests.helpers.evil_npz import npz as evil_npz
from tests.helpers.fixed_files import (
    DTYPE,
    RECORDS,
    SCHEMA,
    WRAPPINGS,
    garbled,
    npz_of,
    records_from,
    tar_of,
    with_hidden_end,
    wrapped,
    zstd,
)

SIZE = DTYPE.itemsize
Found = tuple[list[int], list[Damage]]


def blocks_of(index: ShardIndex) -> list[Block]:
    return [Block(0, *index.block(number)) for number in range(len(index.counts))]


def read(file: ShardFile, index: ShardIndex, blocks: list[Block] | None = None) -> Found:
    """The numbers of the records that :meth:`read` finds in these blocks, and the damage."""
    reader = FixedBlockReader(RECORDS, [file], [index.compression])
    numbers: list[int] = []
    damages: list[Damage] = []
    for block in blocks_of(index) if blocks is None else blocks:
        for found in reader.read(block, 0, block.num_records):
            if isinstance(found, Damage):
                damages.append(found)
                continue
            data = found.buffer[: found.num_records * SIZE].tobytes()
            numbers += np.frombuffer(data, DTYPE)["number"].tolist()
    reader.close()
    return numbers, damages


def loaded(file: ShardFile, index: ShardIndex) -> tuple[list[int], int]:
    """The numbers in the rows that a worker loads, and how many rows it could not load."""
    loader = WindowLoader(SCHEMA, [file], [index.compression])
    window = np.full((index.num_records, SCHEMA.row_bytes), 0xEE, np.uint8)
    parts, row = [], 0
    for block in blocks_of(index):
        parts.append(BlockPlacement(block, np.arange(row, row + block.num_records)[::-1].copy()))
        row += block.num_records
    faulty = [place for places, _ in loader.load(parts, window) for place in places]
    loader.close()
    numbers = window.view(SCHEMA.row_dtype)["number"].reshape(-1)
    return [int(numbers[place]) for part in parts for place in part.places if place not in faulty], len(faulty)


@pytest.fixture(params=["isal", "zlib"], autouse=True)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    inflate.fast_library.cache_clear()
    assert inflate.fast_library().__name__ == ("isal.isal_zlib" if request.param == "isal" else "zlib")
    yield
    inflate.fast_library.cache_clear()


@pytest.mark.parametrize("how", WRAPPINGS)
def test_all_records_are_found_in_their_order(how: str, tmp_path: Path):
    file = make_shard(tmp_path / "a", wrapped(records_from(0, 65), how))
    index = build_fixed_index(file, RECORDS, 7)
    assert index.compression == how and index.damages == () and index.num_records == 65
    assert len(index.counts) == {"none": 10, "npy": 10, "tar": 7, "parquet": 4, "arrow": 4}.get(how, 1)
    assert np.cumsum([0, *index.counts])[:-1].tolist() == index.first_records.tolist()
    assert read(file, index) == (list(range(65)), [])
    assert loaded(file, index) == (list(range(65)), 0)
    assert [decode_indexes(encode_indexes([index]))[0].block(0), index.num_records] == [index.block(0), 65]


def test_the_digest_is_that_of_the_records(tmp_path: Path):
    read = [how for how in WRAPPINGS if how not in ("parquet", "arrow")]  # of these, it is made of less
    files = [make_shard(tmp_path / how, wrapped(records_from(0, 65), how)) for how in read]
    digests = {build_fixed_index(file, RECORDS, 7).digest for file in files}
    other = make_shard(tmp_path / "b", wrapped(records_from(1, 65), "none"))
    assert len(digests) == 1 and build_fixed_index(other, RECORDS, 7).digest not in digests


@pytest.mark.parametrize("how", WRAPPINGS)
def test_any_range_of_a_block(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(npz, "PIECE_BYTES", 4 * SIZE)
    file = make_shard(tmp_path / "a", wrapped(records_from(0, 30), how))
    index = build_fixed_index(file, RECORDS, 30)
    reader = FixedBlockReader(RECORDS, [file], [index.compression])
    block = blocks_of(index)[0]
    for first in range(0, block.num_records, 3):
        for stop in range(first + 1, block.num_records + 1):
            found: dict[int, int] = {}
            for each in reader.read(block, first, stop):
                assert not isinstance(each, Damage)
                records = np.frombuffer(each.buffer[: each.num_records * SIZE].tobytes(), DTYPE)
                found |= {each.first_record + place: int(record["number"]) for place, record in enumerate(records)}
            assert all(found[number] == number for number in range(first, stop))


@pytest.mark.parametrize("how", ["gzip", "zstd", "tar"])
def test_what_is_large_comes_in_pieces(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fixed_blocks, "MAX_WHOLE_BYTES", 10)
    file = make_shard(tmp_path / "a", wrapped(records_from(0, 65), how))
    assert loaded(file, build_fixed_index(file, RECORDS, 7)) == (list(range(65)), 0)


def test_an_npz_goes_on_where_the_reading_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[None] = []
    make_entry = npz._Entry
    monkeypatch.setattr(npz, "_Entry", lambda *given: begun.append(None) or make_entry(*given))
    monkeypatch.setattr(npz, "PIECE_BYTES", 4 * SIZE)
    file = make_shard(tmp_path / "a", npz_of(records_from(0, 60)))
    index = build_fixed_index(file, RECORDS, 7)
    assert len(begun) == len(RECORDS)
    reader = FixedBlockReader(RECORDS, [file], ["npz"])
    (block,) = blocks_of(index)
    for first, stop, times in ((0, 10, 2), (10, 21, 2), (30, 60, 2), (5, 7, 3), (6, 60, 4)):
        assert [found.first_record for found in reader.read(block, first, stop)] == list(range(first, stop, 4))
        assert len(begun) == times * len(RECORDS), f"rows {first} to {stop - 1}"
    reader.close()


# ------------------------------------------------------------------------------------- damage at the index pass


@pytest.mark.parametrize("how", ["none", "gzip", "zstd"])
def test_a_game_that_is_cut(how: str, tmp_path: Path):
    data = records_from(0, 20).tobytes()[:-5]
    file = make_shard(tmp_path / "a", {"none": bytes, "gzip": gzip.compress, "zstd": zstd}[how](data))
    index = build_fixed_index(file, RECORDS, 7)
    assert index.damages == (
        Damage(file.uri, 19, 19 * SIZE, f"a record of {SIZE} bytes", f"{SIZE - 5} bytes", SIZE - 5),
    )
    assert read(file, index) == (list(range(19)), [])


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_compressed_data_that_is_cut_keeps_what_is_in_front(how: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    records = records_from(0, 2000)
    records["values"] = rng.random((2000, 3))
    data = wrapped(records, how)
    file = make_shard(tmp_path / "a", data[: len(data) * 2 // 3])
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert damage.record == index.num_records and "compressed" in damage.expected
    assert (1000 < index.num_records < 1500) if how == "gzip" else index.num_records < 1500
    assert read(file, index) == (list(range(index.num_records)), [])
    assert loaded(file, index) == (list(range(index.num_records)), 0)


def test_of_a_gzip_that_is_cut_the_last_bytes_are_seldom_a_size(tmp_path: Path):
    """Of small records, each second number is a multiple of theirs."""
    records = loaderd.FixedRecords([("value", "<u2")])
    data = gzip.compress(np.random.default_rng(1).integers(0, 1000, 20_000, np.uint16).tobytes())
    for cut in range(len(data) // 2, len(data) // 2 + 20):
        index = build_fixed_index(make_shard(tmp_path / "a", data[:cut]), records, 1000)
        assert index.num_records > 5000


@pytest.mark.parametrize("num_zeros", [1, 5000])
def test_zeros_behind_a_gzip_are_padding(num_zeros: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = wrapped(records_from(0, 65), "gzip") + bytes(num_zeros)
    for most_bytes in (1 << 20, 10):  # inflated at once, and in pieces
        monkeypatch.setattr(fixed_index, "_MAX_AT_ONCE_BYTES", most_bytes)
        monkeypatch.setattr(fixed_blocks, "MAX_WHOLE_BYTES", most_bytes)
        file = make_shard(tmp_path / "a", data)
        index = build_fixed_index(file, RECORDS, 7)
        assert index.damages == () and index.num_records == 65
        assert read(file, index) == (list(range(65)), [])


def games(*changed: tuple[str, bytes]) -> bytes:
    """A tar of three games of ten, with some members in place of others or more of them."""
    whole = {f"{number}.gz": gzip.compress(records_from(10 * number, 10).tobytes()) for number in range(3)}
    return tar_of(list((whole | dict(changed)).items()))


@pytest.mark.parametrize("content", [b"hello", b""])
def test_a_member_that_is_not_what_its_name_says(content: bytes, tmp_path: Path):
    others = ("LICENSE", b"\x1f\x8b\x08"), ("games/._0.gz", b"of macOS")
    file = make_shard(tmp_path / "a.tar", games(("1.gz", content), *others))
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert damage.expected == "a gzip or zstd file in the tar"
    begins = f"one that begins with {content[:4]!r}, in '1.gz', the member at byte [0-9]+ of the tar"
    assert re.match(begins, damage.found)
    assert read(file, index)[0] == [*range(10), *range(20, 30)]


@pytest.mark.parametrize("how", ["gzip", "tar"])
def test_none_of_the_records_of_a_garbled_stream_is_used(how: str, tmp_path: Path):
    data = wrapped(records_from(0, 60), how)
    block = blocks_of(build_fixed_index(make_shard(tmp_path / "whole", data), RECORDS, 7))[0]
    file = make_shard(tmp_path / "a", garbled(data, block.offset + block.num_bytes // 2))
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert damage.record == 0 and "compressed" in damage.expected
    assert read(file, index) == (list(range(10, 60)) if how == "tar" else [], [])


def test_data_whose_end_is_hidden_is_garbled_and_not_cut(tmp_path: Path):
    records = records_from(0, 60)
    records["values"] = np.random.default_rng(0).integers(0, 9, (60, 3))
    data = gzip.compress(records.tobytes())
    file = make_shard(tmp_path / "whole", data)
    index = build_fixed_index(file, RECORDS, 7)
    broken = with_hidden_end(data)
    overwrite(file, broken)
    assert loaded(file, index) == ([], 60)
    index = build_fixed_index(make_shard(tmp_path / "broken", broken), RECORDS, 7)
    assert index.num_records == 0
    (damage,) = index.damages
    assert damage.found == "the end of the file"


def test_a_tar_without_its_end(tmp_path: Path):
    data = games()
    end = len(data.rstrip(b"\0"))
    file = make_shard(tmp_path / "a.tar", data[: -(-end // 512) * 512])
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert "or the zeros at its end" in damage.expected and damage.record == 30
    assert read(file, index)[0] == list(range(30))


def unequal() -> bytes:
    out = records_from(0, 10)
    file = io.BytesIO()
    np.savez(file, version=out["version"], planes=out["planes"], number=out["number"], values=out["values"][:9])
    return file.getvalue()


def lacking() -> bytes:
    file = io.BytesIO()
    np.savez(file, version=np.zeros(3, "<u2"), number=np.zeros(3, "<i4"))
    return file.getvalue()


def garbled_npz() -> bytes:
    data = npz_of(records_from(0, 400))
    return garbled(data, data.index(b"values.npy") + 300)


def changed_npz(front: bytes, place: int, byte: int) -> bytes:
    """A stored npz, with another byte so many behind the last ``front``."""
    out = io.BytesIO()
    records = records_from(0, 3)
    np.savez(out, **{name: records[name] for name in DTYPE.names or ()})
    data = bytearray(out.getvalue())
    data[data.rindex(front) + place] = byte
    return bytes(data)


def shifted_npz() -> bytes:
    """The values of an array begin with the last byte of its header. Its CRC is right."""
    arrays, values = records_from(0, 3), records_from(0, 3)["number"].tobytes()
    whole = {name: npy(f"{arrays[name].shape}", arrays[name].tobytes(), arrays[name].dtype.str) for name in RECORDS}
    length = len(whole["number"]) - len(values) - 10
    return evil_npz(whole | {"number": npy("(3,)", values, arrays["number"].dtype.str, length - 1)})


@pytest.mark.parametrize(
    ("make_data", "said"),
    [
        (shifted_npz, r"expected the values of number.npy, \(3,\) of int32, found 13 bytes"),
        (lambda: changed_npz(b"PK\x01\x02", 6, 109), "expected a whole npz, found zip file version 10.9"),
        (lambda: changed_npz(b"{'descr'", 0, ord(" ")), "expected a numpy array in values.npy"),
        (unequal, "expected arrays with one row a record, found rows: .*'number': 10, 'values': 9"),
        (lacking, "expected an array 'planes', found only .*number.*version"),
        (garbled_npz, "values.npy"),
        (lambda: npz_of(records_from(0, 9))[:-40], "expected a whole npz"),
    ],
)
def test_an_npz_that_does_not_hold_together(make_data: Any, said: str, tmp_path: Path):
    file = make_shard(tmp_path / "a.npz", make_data())
    with pytest.raises(ShardReadError, match=said):
        build_fixed_index(file, RECORDS, 7)


# ---------------------------------------------------------------------------------- damage behind the index pass


@pytest.mark.parametrize(("how", "at"), [("gzip", 0.5), ("tar", 0.5), ("tar", 0.0), ("npz", 0.5)])
def test_what_is_damaged_later_is_named_and_costs_no_other_record(how: str, at: float, tmp_path: Path):
    """``at``: how far into the block; a member of a tar is no gzip any more, if it is its first byte."""
    data = wrapped(records_from(0, 60), how)
    file = make_shard(tmp_path / "a", data)
    index = build_fixed_index(file, RECORDS, 7)
    block = blocks_of(index)[-3 if how == "tar" else 0]
    overwrite(file, garbled(data, block.offset + int(block.num_bytes * at)))
    assert loaded(file, index) == ([*range(30), *range(40, 60)] if how == "tar" else [], block.num_records)
    if how == "tar":
        damages, member = read(file, index)[1], f", in 'games/3.gz', the member at byte {block.offset} of the tar"
        assert [damage.record for damage in damages] == list(range(30, 40))
        assert [damage.found.endswith(member) for damage in damages] == [True] * 10


def stored_npz() -> bytes:
    out, records = io.BytesIO(), records_from(0, 60)
    np.savez(out, **{name: records[name] for name in DTYPE.names or ()})
    return out.getvalue()


@pytest.mark.parametrize(
    ("how", "data", "front", "said"),
    [
        ("gzip", gzip.compress(records_from(0, 60).tobytes(), 0), b"\x1f\x8b", "expected valid compressed data"),
        (
            "npz",
            stored_npz(),
            records_from(0, 60)["values"].tobytes(),
            r"expected values\.npy of \d+ bytes with its CRC",
        ),
    ],
    ids=["gzip", "npz"],
)
def test_a_wrong_crc_is_named_with_the_last_records(
    how: Any, data: bytes, front: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the CRC tells of what is large, and not compressed."""
    monkeypatch.setattr(fixed_blocks, "MAX_WHOLE_BYTES", 0)
    file = make_shard(tmp_path / "a", data)
    index = build_fixed_index(file, RECORDS, 7)
    overwrite(file, garbled(data, data.index(front) + 300))
    reader = FixedBlockReader(RECORDS, [file], [how])
    (block,) = blocks_of(index)
    for first, stop in ((0, 30), (30, 59)):
        assert len(list(reader.read(block, first, stop))) == 1
    with pytest.raises(ShardReadError, match=said):
        list(reader.read(block, 59, 60))
    reader.close()
    assert loaded(file, index) == ([], 60)


GAME = np.dtype(
    [("board", "u1", (8,)), ("score", "<f4"), ("clock", "<i2", (1,)), ("result", "i1"), ("size", "<i4", (1,))]
)


def game_npz(rows: int, **other: Any) -> bytes:
    """A game of ``rows`` positions, with its result and size once, a column of scores, and clocks without an axis."""
    out = io.BytesIO()
    arrays = {
        "board": np.arange(rows * 8, dtype=np.uint8).reshape(rows, 8),
        "score": np.asfortranarray(np.arange(rows, dtype=np.float32).reshape(rows, 1)),
        "clock": np.arange(rows, dtype=np.int16),
        "result": np.int8(-1),
        "size": np.int32(19),
    }
    np.savez(out, **{**arrays, **other})
    return out.getvalue()


def test_an_npz_with_columns_and_with_values_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(npz, "PIECE_BYTES", 4 * GAME.itemsize)
    records = loaderd.FixedRecords(GAME)
    file = make_shard(tmp_path / "a", game_npz(57))
    index = build_fixed_index(file, records, 10)
    assert index.num_records == 57 and not index.damages
    reader = FixedBlockReader(records, [file], ["npz"])
    pieces = [
        np.frombuffer(piece.buffer.tobytes(), GAME, piece.num_records)
        for piece in reader.read(Block(0, *index.block(0)), 0, 57)
        if not isinstance(piece, Damage)
    ]
    rows = np.concatenate(pieces)
    assert len(pieces) > 3
    assert (rows["board"] == np.arange(57 * 8, dtype=np.uint8).reshape(57, 8)).all()
    assert rows["score"].tolist() == rows["clock"][:, 0].tolist() == list(range(57))
    assert (rows["result"] == -1).all() and (rows["size"] == 19).all()


def test_an_npz_with_less_than_the_schema_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wide = np.dtype(
        [("board", "u1", (11,)), ("score", "<f4"), ("grid", "<i2", (4, 2)), ("none", "<f4", (3,)), ("no", "u1")]
    )
    monkeypatch.setattr(npz, "PIECE_BYTES", 4 * wide.itemsize)
    records = loaderd.FixedRecords(wide, padded={"board": 8, "grid": 1, "none": 0, "no": 0})
    grid = np.arange(19 * 3 * 2, dtype=np.int16).reshape(19, 3, 2)
    (index,) = [build_fixed_index(make_shard(tmp_path / "a", game_npz(19, grid=grid)), records, 10)]
    reader = FixedBlockReader(records, [index.file], ["npz"])
    pieces = [
        np.frombuffer(piece.buffer.tobytes(), wide, piece.num_records)
        for piece in reader.read(Block(0, *index.block(0)), 0, 19)
        if not isinstance(piece, Damage)
    ]
    rows = np.concatenate(pieces)
    assert (rows["board"][:, :8] == np.arange(19 * 8, dtype=np.uint8).reshape(19, 8)).all()
    assert (rows["grid"][:, :3] == grid).all() and not rows["grid"][:, 3:].any() and not rows["board"][:, 8:].any()
    assert not rows["none"].any() and not rows["no"].any() and rows["score"].tolist() == list(range(19))
    for wrong, said in (
        (game_npz(9, grid=np.zeros((9, 5, 2), "i2")), r"\(rows, 1 to 4, 2\) in C order"),
        (
            game_npz(9, grid=grid[:9], none=np.zeros((9, 2), "f4")),
            r"of float32, \(rows, 3\) in C order, found",
        ),
        (game_npz(9, grid=np.zeros((9, 3, 1), "i2")), r"'grid' of int16"),
        (game_npz(9, grid=grid[:9], no=np.zeros((9, 2), "u1")), r"'no' of uint8"),
        (game_npz(9, grid=grid[:9], board=np.zeros((9, 7), "u1")), r"'board' of uint8, \(rows, 8 to 11\) in C order"),
    ):
        with pytest.raises(ShardReadError, match=said):
            build_fixed_index(make_shard(tmp_path / "b", wrong), records, 10)
    assert records != loaderd.FixedRecords(wide) and pickle.loads(pickle.dumps(records)) == records
    for padded in ({"board": 12}, {"board": -1}, {"other": 1}, {"score": 1}, ["board"]):
        with pytest.raises(SchemaError, match="padded"):
            loaderd.FixedRecords(wide, padded=padded)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_data", "said"),
    [
        (
            lambda: game_npz(9, score=np.zeros((9, 2), "f4")),
            r"expected array 'score' of float32, \(rows\) in C order",
        ),
        (lambda: game_npz(9, board=np.zeros(8, "u1")), r"expected array 'board' of uint8, \(rows, 8\) in C order"),
        (lambda: game_npz(9, board=np.uint8(0)), r"expected array 'board' of uint8, \(rows, 8\) in C order, found"),
        (
            lambda: game_npz(9, result=np.int16(0)),
            r"expected array 'result' of int8, \(rows\) in C order, found int16",
        ),
        (lambda: game_npz(9, result=np.zeros(1, "i1")), r"rows: {'board': 9, 'score': 9, 'clock': 9, 'result': 1}"),
        (lambda: game_npz(9).replace(b"\n\xff", b"\n\xfe"), "result.npy of .* bytes with its CRC"),
    ],
)
def test_what_is_no_column_and_no_value_for_all_rows(make_data: Any, said: str, tmp_path: Path):
    file = make_shard(tmp_path / "a.npz", make_data())
    with pytest.raises(ShardReadError, match=said):
        build_fixed_index(file, loaderd.FixedRecords(GAME), 10)


def test_an_npz_of_which_no_array_has_rows(tmp_path: Path):
    file = make_shard(tmp_path / "a.npz", game_npz(9))
    with pytest.raises(ShardReadError, match="one row a record, found no rows, but a single value in each of"):
        build_fixed_index(file, loaderd.FixedRecords(GAME[["result", "size"]]), 10)


def test_an_npz_that_has_another_number_of_rows_later(tmp_path: Path):
    file = make_shard(tmp_path / "a", npz_of(records_from(0, 60)))
    reader = FixedBlockReader(RECORDS, [file], ["npz"])
    with pytest.raises(
        ShardReadError, match=r"expected 50 rows from row 0 on \(the count when it was indexed\), found 60 rows"
    ):
        list(reader.read(Block(0, 0, file.size_bytes, 50, 0, b""), 0, 50))
    reader.close()


def test_more_records_than_were_indexed_are_those_of_another_file(tmp_path: Path):
    file = make_shard(tmp_path / "a", zstd(records_from(0, 60).tobytes()))
    index = build_fixed_index(file, RECORDS, 7)
    more = np.zeros(145, DTYPE)
    more["version"] = RECORDS.expect["version"]
    data = zstd(more.tobytes())
    skipped = bytes(file.size_bytes - len(data) - 8)  # a skippable frame: RFC 8878, 3.1.2
    overwrite(file, data + struct.pack("<II", 0x184D2A50, len(skipped)) + skipped)
    with pytest.raises(ShardReadError, match=r"expected 60 records \(the count when it was indexed\), found more"):
        read(file, index)
