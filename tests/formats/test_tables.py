"""Parquet and Arrow files as shards: random tables against pyarrow's own readers, damage, and those that mean ill."""

from __future__ import annotations

import gc
import io
import pickle
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather
from pyarrow import parquet as pq

import loaderd
from loaderd.cli.main import main
from loaderd.errors import LoaderdError, RecordMismatchError, SchemaError, ShardFormatError, ShardReadError
from loaderd.formats import arrow_columns, fixed_blocks, parquet
from loaderd.formats.detect import columns_of
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.storage.shard_file import Block, ShardFile
from tests.formats.shard_bytes import make_shard
from tests.helpers.fixed_files import DTYPE, RECORDS, parquet_of, records_from, wrapped
from tests.reliability import fixed_cases
from tests.reliability.mutate import BYTES


def read(file: ShardFile, records: loaderd.FixedRecords, rng: Random | None = None) -> Any:
    """The records of all blocks, in order; with ``rng``, in pieces of its choice. Raises as the reading does."""
    index = build_fixed_index(file, records, 7)
    assert not index.damages
    reader, found = FixedBlockReader(records, [file], [index.compression]), [np.zeros(0, records.dtype)]
    for number in range(len(index.counts)):
        block = Block(0, *index.block(number))
        first = 0
        while first < block.num_records:
            stop = rng.randint(first + 1, block.num_records) if rng else block.num_records
            if rng and rng.randrange(3) == 0:  # elsewhere in between, and back
                list(reader.read(block, 0, 1))
            for piece in reader.read(block, first, stop):
                found.append(np.frombuffer(piece.buffer.tobytes(), records.dtype))
            first = stop
    reader.close()
    return np.concatenate(found)


KINDS: dict[str, Callable[[np.random.Generator, int], pa.Array]] = {
    **{
        f"{dtype}": lambda rng, n, dtype=dtype: pa.array(rng.integers(0, 100, n).astype(dtype))
        for dtype in ("int8", "uint16", "int32", "int64", "float16", "float32", "float64", "bool", "M8[us]", "m8[ns]")
    },
    "fixed": lambda rng, n: pa.array([rng.bytes(5) for _ in range(n)], pa.binary(5)),
    "binary": lambda rng, n: pa.array([rng.bytes(4) for _ in range(n)]),
    "few": lambda rng, n: pa.array(
        [[b"abc", b"xyz"][number] for number in rng.integers(0, 2, n)]
    ).dictionary_encode(),
    "list": lambda rng, n: pa.array(rng.random((n, 3)).tolist(), pa.list_(pa.float32())),
    "large list": lambda rng, n: pa.array(rng.integers(0, 9, (n, 2)).tolist(), pa.large_list(pa.int16())),
    "fixed list": lambda rng, n: pa.array(rng.integers(0, 9, (n, 4)).tolist(), pa.list_(pa.uint8(), 4)),
    "lists": lambda rng, n: pa.array(rng.integers(0, 9, (n, 2, 3)).tolist(), pa.list_(pa.list_(pa.int32()), 2)),
}


def bytes_of(table: pa.Table, how: str, rows: int, compression: str) -> bytes:
    out = io.BytesIO()
    if how == "arrow":
        of_feather = {"snappy": "lz4", "none": "uncompressed"}.get(compression, compression)
        feather.write_feather(table, out, compression=of_feather, chunksize=rows)
    else:
        dictionary, _, version = how.partition(" ")
        options = {"use_dictionary": dictionary == "dictionary", "data_page_version": version, "data_page_size": 100}
        pq.write_table(table, out, row_group_size=rows, compression=compression, **options)
    return out.getvalue()


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    how=st.sampled_from(["arrow", "dictionary 1.0", "plain 1.0", "dictionary 2.0", "plain 2.0"]),
    rows=st.integers(1, 60),
    block=st.integers(1, 30),
    compression=st.sampled_from(["none", "snappy", "zstd"]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_read_as_pyarrow_reads_it(tmp_path, monkeypatch, kinds, how, rows, block, compression, seed):
    monkeypatch.setattr(arrow_columns, "PIECE_BYTES", 100)
    rng = np.random.default_rng(seed)
    table = pa.table({f"{number} {kind}": KINDS[kind](rng, rows) for number, kind in enumerate(kinds)})
    file = make_shard(tmp_path / "a", bytes_of(table, how, block, compression))
    records, left_out = columns_of(file) or (None, {})
    assert records is not None and not left_out and list(records) == table.column_names
    found = read(file, records, Random(seed))
    for name, column in zip(table.column_names, table.columns, strict=True):
        if found[name].dtype == np.uint8 and column.type not in (pa.list_(pa.uint8(), 4),):
            assert [each.tobytes() for each in found[name]] == column.to_pylist(), name
        else:
            plain = np.array(column.to_pylist()) if found[name].ndim > 1 else column.to_numpy()
            assert (found[name] == plain).all(), name


LISTS: dict[str, tuple[pa.DataType, Callable[[Random], Any], loaderd.schema.Feature]] = {
    "numbers": (pa.int64(), lambda rng: rng.randint(-9, 9), loaderd.Int64((5,), pad=-1)),
    "floats": (pa.float32(), lambda rng: rng.randint(0, 9) / 2, loaderd.Float((5,), pad=0.5)),
    "pairs": (pa.list_(pa.int16(), 2), lambda rng: [rng.randint(0, 9), 7], loaderd.Raw("<i2", (5, 2), pad=3)),
    "words": (
        pa.string(),
        lambda rng: "abc"[: rng.randint(0, 3)],
        loaderd.Raw("S3", (5,), pad=True, as_list=True),
    ),
    "bytes": (
        pa.binary(),
        lambda rng: rng.randbytes(rng.randint(0, 4)),
        loaderd.Raw("uint8", (5, 4), pad=9, as_list=True),
    ),
}


def padded(value: Any, feature: Any) -> tuple[Any, int] | None:
    """By a plain loop: the values of a row, and its length; None where they are too many."""
    length, room = len(value), feature.shape[0]
    if length > room and not feature.cut:
        return None
    value, pad = list(value[:room]), b"" if feature.is_text else feature.pad
    if feature.is_text:
        value = [text.encode() for text in value]
    elif feature.as_list:
        value = [[*item, *[pad] * (4 - len(item))] for item in value]
    missing = [np.full(feature.shape[1:], pad, feature.value_dtype).tolist()] * (room - len(value))
    return value + missing, len(value) * (2 if feature.shape == (5, 2) else 1)


@given(
    kinds=st.lists(st.sampled_from(sorted(LISTS)), min_size=1, max_size=3),
    how=st.sampled_from(["arrow", "dictionary 1.0", "plain 2.0"]),
    is_large=st.booleans(),
    cut=st.booleans(),
    rows=st.integers(1, 40),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_of_any_length_are_padded(tmp_path, monkeypatch, kinds, how, is_large, cut, rows, seed):
    monkeypatch.setattr(arrow_columns, "PIECE_BYTES", 300)
    rng, features, columns = Random(seed), {}, {}
    for number, kind in enumerate(kinds):
        inner, make, feature = LISTS[kind]
        most = 5 if rng.randrange(3) else 6
        values = [[make(rng) for _ in range(rng.randint(0, most))] for _ in range(rows)]
        of = pa.large_list(inner) if is_large else pa.list_(inner)
        columns[f"{kind} {number}"] = pa.array(values, of)
        features |= {f"{kind} {number}": replace(feature, cut=cut), f"{number}": loaderd.Length(f"{kind} {number}")}
    table = pa.table(columns)
    file = make_shard(tmp_path / "a", bytes_of(table, how, rng.randint(1, rows), "none"))
    expected = {name: [padded(row, features[name]) for row in table[name].to_pylist()] for name in columns}
    records = loaderd.FixedRecords(features)
    assert pickle.loads(pickle.dumps(records)) == records
    if wrong := [name for name, values in expected.items() if None in values]:
        with pytest.raises(ShardReadError, match=rf"up to 5 values in row {expected[wrong[0]].index(None)}, found 6"):
            for name in wrong[:1]:
                read(file, loaderd.FixedRecords({name: features[name]}))
        return
    found = read(file, records, rng)
    for name, values in expected.items():
        assert [*zip(found[name].tolist(), found[name[-1]].tolist(), strict=True)] == values, name
    proposed, left_out = columns_of(file) or (None, {})
    if proposed is not None:  # by the first rows alone: others may have longer lists
        wide = {n: replace(f, cut=True) if getattr(f, "pad", None) is not None else f for n, f in proposed.items()}
        names = [name for name in columns if getattr(proposed.get(name), "pad", None) is not None]
        if not left_out and len(names) == len(columns):
            assert len(read(file, loaderd.FixedRecords(wide))) == rows


def test_a_list_that_needs_a_pad_is_told(tmp_path: Path):
    lists = {"words": [["a"], ["b", "c"]], "moves": [[1], [2, 3]], "data": [b"a", b"bc"]}
    file = make_shard(tmp_path / "a", pq_bytes(lists))
    for feature in (
        {"words": loaderd.Raw("S1", (2,), pad=True)},  # not a list of words, but one text
        {"moves": loaderd.Int64((2,))},
        {"data": loaderd.PackedBits(16)},
    ):
        with pytest.raises(ShardReadError, match="Where lengths differ, give FixedRecords a feature with a pad"):
            read(file, loaderd.FixedRecords(feature))


@pytest.mark.parametrize("how", ["arrow", "plain 1.0"])
def test_numbers_may_be_read_as_any_that_hold_them(how: str, tmp_path: Path):
    columns = {"a": pa.array([1, -2], "int16"), "b": pa.array([[0.5], []], pa.list_(pa.float32())), "c": [1, 2]}
    file = make_shard(tmp_path / "a", bytes_of(pa.table(columns), how, 2, "none"))
    found = read(file, loaderd.FixedRecords({"a": loaderd.Int64(), "b": loaderd.Raw("float64", (1,), pad=0)}))
    assert found["a"].tolist() == [1, -2] and found["b"].tolist() == [[0.5], [0.0]]
    for name, feature in (("c", "int32"), ("c", "float32"), ("a", "uint16"), ("a", "S2"), ("a", "M8[s]")):
        with pytest.raises(ShardReadError, match=f"column '{name}' of .*, found int"):
            read(file, loaderd.FixedRecords({name: loaderd.Raw(feature)}))


@pytest.mark.parametrize("how", ["arrow", "plain 1.0", "dictionary 2.0"])
def test_dates_are_days(how: str, tmp_path: Path):
    days = np.array([0, 20_000, -3], "M8[D]")
    columns = {"day": days, "days": pa.array([days.tolist()] * 3, pa.list_(pa.date32())), "price": [Decimal(2)] * 3}
    file = make_shard(tmp_path / "a", bytes_of(pa.table(columns), how, 2, "none"))
    assert pa.table(columns).schema.field("day").type == pa.date32()
    for dtype in ("int32", "int64", "float64", "M8[D]"):
        found = read(file, loaderd.FixedRecords(np.dtype([("day", dtype), ("days", dtype, (3,))])))
        assert found["day"].tolist() == days.astype(dtype).tolist()
        assert found["days"].tolist() == [days.astype(dtype).tolist()] * 3
    for name, dtype in (("day", "int16"), ("day", "M8[s]"), ("price", "float64")):
        with pytest.raises(ShardReadError, match=f"column '{name}' of .*, found d"):
            read(file, loaderd.FixedRecords(np.dtype([(name, dtype)])))


@pytest.mark.parametrize("how", ["arrow", "dictionary 1.0"])
def test_a_null_becomes_the_default(how: str, tmp_path: Path):
    columns = {
        "number": pa.array([1, None, 3], "int32"),
        "pair": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2)),
        "words": pa.array([None, ["a", "bc"], []]),
        "name": pa.array(["x", None, "yz"]).dictionary_encode(),
        "bits": pa.array([None, b"ab", b"cd"], pa.binary(2)),
    }
    features = {
        "number": loaderd.Raw("int32", default=-7),
        "pair": loaderd.Raw("int8", (2,), default=[8, 9]),
        "words": loaderd.Raw("S2", (3,), pad=True, as_list=True, default=()),
        "name": loaderd.Raw("S2", default=b"?"),
        "bits": loaderd.PackedBits(16, default=b"\0\xff"),
        "num_words": loaderd.Length("words"),
    }
    file = make_shard(tmp_path / "a", bytes_of(pa.table(columns), how, 3, "none"))
    found = read(file, loaderd.FixedRecords(features))
    assert found["number"].tolist() == [1, -7, 3] and found["pair"].tolist() == [[1, 2], [3, 4], [8, 9]]
    assert found["words"].tolist() == [[b"", b"", b""], [b"a", b"bc", b""], [b"", b"", b""]]
    assert found["num_words"].tolist() == [0, 2, 0] and found["name"].tolist() == [b"x", b"?", b"yz"]
    assert found["bits"].tobytes() == b"\0\xffabcd"
    proposed, left_out = columns_of(file) or (None, {})
    assert proposed is not None and not left_out and proposed["number"] == loaderd.Raw("int32", default=0)
    assert read(file, proposed)["number"].tolist() == [1, 0, 3]
    wrong = {**features, "name": loaderd.Raw("S1", default=b"?")}
    with pytest.raises(ShardReadError, match="up to 1 bytes in row 2, found 2"):
        read(file, loaderd.FixedRecords(wrong))


def test_lists_of_a_plain_file_have_their_padding_and_a_length_that_is_looked_at(tmp_path: Path):
    features = {"moves": loaderd.Int64((3,), pad=-1), "n": loaderd.Length("moves")}
    schema = loaderd.Schema(loaderd.FixedRecords(features), {name: loaderd.Array(name) for name in features})
    rows = np.array([([5, -1, -1], 1), ([5, 6, 7], 3), ([5, 6, 7], 4), ([0, 0, 0], -1)], "3<i8, <i4")
    (tmp_path / "a").write_bytes(rows[:2].tobytes())
    with loaderd.Loader(tmp_path / "a", schema, batch_size=2, shuffle=False, workers=1) as loader:
        (batch,) = loader
        assert batch["moves"].tolist() == [[5, -1, -1], [5, 6, 7]] and batch["n"].tolist() == [1, 3]
    for number in (2, 3):
        (tmp_path / "a").write_bytes(rows[[0, number]].tobytes())
        with (
            loaderd.Loader(tmp_path / "a", schema, batch_size=2, shuffle=False, workers=1) as loader,
            pytest.raises(RecordMismatchError, match=r"record 1 .*n of 0 to 3, found n (4|-1)"),
        ):
            next(iter(loader))
    with pytest.raises(SchemaError, match="bits must not be given with features"):
        loaderd.FixedRecords({"a": loaderd.Int64()}, bits=["a"])


@pytest.mark.parametrize("most_bytes", [64 << 20, 100 << 10, 0])
def test_tables_are_opened_once_as_far_as_they_may_be_kept_and_freed(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[weakref.ref[Any]] = []

    def open_table(*arguments: Any) -> Any:
        table = table_of(*arguments)
        opened.append(weakref.ref(table))
        return table

    table_of = fixed_blocks.open_table
    monkeypatch.setattr(fixed_blocks, "open_table", open_table)
    monkeypatch.setattr(fixed_blocks, "_MOST_KEPT_BYTES", most_bytes)
    rng, files, every = Random(most_bytes), [], []
    for number in range(8):
        every.append(records_from(100 * number, 60))
        files.append(make_shard(tmp_path / f"{number}", wrapped(every[-1], ("parquet", "arrow", "npz")[number % 3])))
    indexes = [build_fixed_index(file, RECORDS, 7) for file in files]
    reader = FixedBlockReader(RECORDS, files, [index.compression for index in indexes])
    for _ in range(300):
        shard = rng.randrange(len(files))
        block = Block(shard, *indexes[shard].block(rng.randrange(len(indexes[shard].counts))))
        first = rng.randrange(block.num_records)
        stop = rng.randint(first + 1, block.num_records)
        found = b"".join(piece.buffer.tobytes() for piece in reader.read(block, first, stop))
        start = block.first_record
        assert found == every[shard][start + first : start + stop].tobytes()
    gc.collect()
    alive = sum(table() is not None for table in opened)
    assert alive == {64 << 20: 8, 0: 1}.get(most_bytes, alive) and alive <= 8
    assert (len(opened) == 8) == (most_bytes == 64 << 20)
    reader.close()
    gc.collect()
    assert not any(table() is not None for table in opened)


TABLE = pa.table({"x": pa.array(np.arange(50, dtype="i4")), "l": pa.array([[1.0, 2.0]] * 50, pa.list_(pa.float32()))})
ROW = np.dtype([("x", "<i4"), ("l", "<f4", (2,))])


@pytest.mark.parametrize("how", ["arrow", "dictionary 1.0", "plain 2.0"])
@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([*range(33), None, *range(16)], pa.int32()), r"column 'x' of int32: a value in row 33, found null"),
        (pa.array(np.arange(50)), "expected column 'x' of int32, found int64"),
        (None, r"expected a column 'x', found only \['l'\]"),
        (
            pa.array([[1.0, 2.0]] * 41 + [[1.0]] + [[2.0] * 2] * 8, pa.list_(pa.float32())),
            "2 values in row 41, found one of 1",
        ),
        (
            pa.array([[1.0, 2.0]] * 41 + [[None, 1]] + [[2.0] * 2] * 8, pa.list_(pa.float32())),
            "a value in row 41, found null",
        ),
        (pa.array(["abcd"] * 50), r"column 'l' of \('<f4', \(2,\)\), found (dictionary<.*>|string)"),
    ],
)
def test_what_does_not_fit_is_named(how: str, column: Any, said: str, tmp_path: Path):
    name = "x" if column is None or pa.types.is_integer(column.type) else "l"
    table = (
        TABLE.drop_columns(["x"])
        if column is None
        else TABLE.set_column(TABLE.column_names.index(name), name, column)
    )
    file = make_shard(tmp_path / "a", bytes_of(table, how, 20, "zstd"))
    with pytest.raises(ShardReadError, match=said) as caught:
        read(file, loaderd.FixedRecords(ROW))
    assert str(caught.value).startswith(f"{file.uri}: record ")


def test_rows_of_one_size_are_no_records_of_several(tmp_path: Path):
    rows = np.ones(9, [("v", "u1"), ("x", "u1")])
    np.savez(tmp_path / "a.npz", v=rows["v"], x=rows["x"])
    np.save(tmp_path / "a.npy", rows)
    for kind, how in (("parquet", "plain 1.0"), ("arrow", "arrow")):
        table = pa.table({name: rows[name] for name in ("v", "x")})
        (tmp_path / f"a.{kind}").write_bytes(bytes_of(table, how, 9, "zstd"))
    schema = loaderd.Schema.of_stored(loaderd.FixedRecords(rows.dtype, sizes=("v", {1: 1, 2: 2})))
    for kind in ("npz", "npy", "parquet", "arrow"):
        with pytest.raises(
            ShardFormatError, match=f"is of the kind {kind}, whose rows have one size, and not records"
        ):
            loaderd.Loader(tmp_path / f"a.{kind}", schema, batch_size=9, index_cache="none")
    with pytest.raises(SchemaError, match="Columns hold rows of one size"):
        loaderd.Dataset(loaderd.Columns(v=tmp_path / "a.npy", x=tmp_path / "a.npz"), schema)


@pytest.mark.parametrize("batch_bytes", [1 << 10, 1 << 26])
@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", None])
def test_text_is_read_in_lists_and_in_any_encoding(
    encoding: str | None, batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parquet, "_BATCH_BYTES", batch_bytes)
    names = [f"{number:016d}" for number in range(2000)]
    pairs = [[name[-3:], name[-1:]] for name in names]
    columns = {
        "name": pa.array(names),
        "pair": pa.array(pairs),
        "bytes": pa.array([[name[-3:].encode()] * 2 for name in names], pa.list_(pa.binary(), 2)),
        "unread": pa.array([[name] * (number % 3) for number, name in enumerate(names)]),
    }
    options = {} if encoding is None else {"use_dictionary": False, "column_encoding": encoding}
    file = make_shard(tmp_path / "a", pq_bytes(columns, data_page_size=1000, **options))
    row = np.dtype([("name", "S16"), ("pair", "S3", (2,)), ("bytes", "u1", (2, 3))])
    found = read(file, loaderd.FixedRecords(row), Random(0))
    assert found["name"].tolist() == [name.encode() for name in names]
    assert found["pair"].tolist() == [[text.encode() for text in pair] for pair in pairs]
    assert [each.tobytes() for each in found["bytes"]] == [2 * name[-3:].encode() for name in names]
    records, left_out = columns_of(file) or (None, {})
    assert records is not None
    assert [records.dtype[name] for name in row.names or ()] == [row[name] for name in row.names or ()]
    if batch_bytes > 1 << 10:  # else the first batch has the first row alone, whose list is empty
        assert records["unread"] == loaderd.Raw("S16", (2,), pad=True, as_list=True) and not left_out


def test_a_file_of_arrow_that_points_beyond_its_values_is_refused(tmp_path: Path):
    """pyarrow takes from a dictionary without looking, and may end the process."""
    values = pa.array(["aaaa", "bbbb", "cccc", "dddd"])
    column = pa.DictionaryArray.from_arrays(np.arange(400, dtype="i4") % 4, values)
    data = bytearray(bytes_of(pa.table({"x": column}), "arrow", 400, "none"))
    offsets = np.arange(0, 20, 4, "i4")
    at = data.find(offsets.tobytes())
    offsets[-1] = 24
    data[at : at + 20] = offsets.tobytes()
    with pytest.raises(ShardReadError, match=r"record batch 0 of an Arrow file, found In column 0: .*out of bounds"):
        read(make_shard(tmp_path / "a", bytes(data)), loaderd.FixedRecords(np.dtype([("x", "S4")])))
    columns = {"x": np.arange(9), "l": pa.array([[]] * 9, pa.list_(pa.int32(), 0))}
    file = make_shard(tmp_path / "b", feather_bytes(columns))
    with pytest.raises(ShardReadError, match=r"column 'l' of int32, found fixed_size_list<item: int32>\[0\]"):
        read(file, loaderd.FixedRecords(np.dtype([("x", "i8"), ("l", "i4")])))


@pytest.mark.parametrize("how", ["parquet", "arrow"])
def test_damage_costs_a_block_and_is_named(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The index is made of what the file says of itself: damage shows when the block is read."""
    data = bytearray(wrapped(records_from(0, 60), how))
    file = make_shard(tmp_path / "a", bytes(data))
    index = build_fixed_index(file, RECORDS, 7)
    end = int(index.offsets[1] + index.num_bytes[1])
    data[end - 400 : end] = bytes(400)
    (tmp_path / "a").write_bytes(data)
    schema = loaderd.Schema(RECORDS, {"number": loaderd.Array("number")})
    options: dict[str, Any] = {"batch_size": 10, "shuffle": False, "index_cache": "none", "workers": 1}
    with (
        pytest.raises(
            ShardReadError, match=r"record 20 .*\(10 of the 10 records of this batch cannot be delivered\)"
        ),
        loaderd.Loader(file.uri, schema, **options) as loader,
    ):
        list(loader)
    with loaderd.Loader(file.uri, schema, **options, on_corrupt="skip_any") as loader, pytest.warns():
        assert [number for batch in loader for number in batch["number"].tolist()] == [*range(20), *range(40, 60)]
    with pytest.raises(SystemExit) as ended:
        main(["verify", file.uri, "--schema", "tests.helpers.fixed_files:SCHEMA"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "40 healthy records" in said and "1 damage in 1 of them" in said and f"{how.capitalize()} file" in said


def test_a_row_group_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = make_shard(tmp_path / "a", parquet_of(records_from(0, 60)))
    monkeypatch.setattr(arrow_columns, "MAX_BLOCK_BYTES", 500)
    with pytest.raises(ShardReadError, match=r"at most 500 bytes of the columns that are read in block 0"):
        read(file, RECORDS)


_BOMBS = {
    "pages": lambda: pq_bytes({"x": np.zeros(1 << 27, np.uint8)}, compression="zstd", use_dictionary=False),
    "lists": lambda: pq_bytes(
        {"x": pa.ListArray.from_arrays([0, 1 << 27], np.zeros(1 << 27, np.uint8))}, compression="zstd"
    ),
    "text": lambda: pq_bytes({"x": pa.array([bytes(1 << 20)] * 200)}, compression="zstd"),
    "prefix": lambda: pq_bytes(
        {"x": pa.array([bytes(1 << 16)] * 3000)},
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BYTE_ARRAY",
    ),
    "width": lambda: pq_bytes(
        {"x": pa.array([bytes(1 << 20)] * 300, pa.binary(1 << 20))},
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
    ),
    "footer": lambda: _footer_of_columns(900_000),
    "columns": lambda: _footer_of_columns(200_000),
    "groups": lambda: _footer_of_columns(20_000, 13),
    "arrow": lambda: feather_bytes({"x": np.zeros(1 << 27, np.uint8)}),
}


def pq_bytes(columns: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=1 << 30, **options)
    return out.getvalue()


def _footer_of_columns(number: int, groups: int = 1) -> bytes:
    """A Parquet file of nothing but row groups of so many columns, in Thrift's compact protocol."""
    group = b"\x19\xfc" + _varint(number) + b"\x26\0\0" * number + b"\x16\0\x16\0\0"
    footer = b"\x15\2\x19\x1c\x48\x01a\x15\0\0\x16\0\x19" + bytes([groups << 4 | 12]) + groups * group + b"\0"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _varint(number: int) -> bytes:
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])


def feather_bytes(columns: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    feather.write_feather(pa.table(columns), out, compression="zstd", chunksize=1 << 30)
    return out.getvalue()


_READ = """
import sys
import numpy as np, loaderd
from loaderd.errors import LoaderdError
from loaderd.formats import arrow_columns
from loaderd.formats.detect import columns_of
from loaderd.storage.files import list_shards
from tests.formats.test_tables import read
from tests.reliability.fixed_cases import _forget_peak, _peak_mib
arrow_columns.MAX_BLOCK_BYTES = 64 << 20
_forget_peak()  # which getrusage takes over from the process that started this one
before_mib = _peak_mib()
try:
    file = list_shards(sys.argv[1])[0]
    columns_of(file)
    read(file, loaderd.FixedRecords(np.dtype([("x", sys.argv[2])])))
except LoaderdError as error:
    print(int(_peak_mib() - before_mib), error.message)
"""


@pytest.mark.parametrize("what", sorted(_BOMBS))
def test_a_bomb_takes_no_memory(what: str, tmp_path: Path):
    """What takes memory is limited, whatever of it the footer says."""
    path = tmp_path / "a"
    path.write_bytes(_BOMBS[what]())
    assert path.stat().st_size < 4 << 20
    dtype = "S8" if what in ("text", "prefix") else "u1"
    run = subprocess.run([sys.executable, "-c", _READ, path, dtype], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    used_mib, _, message = run.stdout.partition(" ")
    assert int(used_mib) < 200 and "expected" in message, run.stdout


@pytest.mark.parametrize("how", ["parquet", "arrow"])
def test_mutated_files_give_an_error_or_the_rows_that_pyarrow_reads(how: str, tmp_path: Path):
    """Of Parquet with the CRCs of pages, the rows are the right ones."""
    table = pq.read_table(io.BytesIO(parquet_of(records_from(0, 60)))).drop_columns(["other"])
    healthy, rng = io.BytesIO(), Random(how)
    if how == "parquet":
        pq.write_table(table, healthy, row_group_size=20, write_page_checksum=True)
    else:
        feather.write_feather(table, healthy, compression="uncompressed", chunksize=20)
    fixed_cases._forget_peak()
    before_mib = fixed_cases._peak_mib()
    right, counts = records_from(0, 60).tobytes(), {"refused": 0, "read": 0, "right": 0}
    for number in range(300):
        data = rng.choice(list(BYTES.values()))(healthy.getvalue(), rng, healthy.getvalue())
        file = make_shard(tmp_path / str(number), data)
        try:
            found = read(file, RECORDS)
        except LoaderdError as error:
            assert isinstance(error, ShardReadError) and file.uri in str(error) and len(str(error)) < 3000
            counts["refused"] += 1
            continue
        counts["read"] += 1
        counts["right"] += found.tobytes() == right
        if found.dtype != DTYPE or found.tobytes() == right:
            continue
        try:
            other = pq.read_table(file.uri) if how == "parquet" else feather.read_table(file.uri, memory_map=False)
        except (OSError, pa.ArrowException):
            continue  # it is a plain file now, whose first bytes are no magic
        assert found["number"].tolist() == other["number"].to_pylist()
    assert counts["refused"] > 100 and counts["right"] > 5
    assert fixed_cases._peak_mib() - before_mib < 100


def test_the_headers_of_pages_are_read_as_pyarrow_writes_them():
    for options in ({"data_page_version": "2.0"}, {"use_dictionary": False, "write_page_index": True}, {}):
        data = bytearray(pq_bytes({"x": np.arange(5000) % 700}, data_page_size=1000, compression="none", **options))
        column = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0)
        begin = column.dictionary_page_offset or column.data_page_offset
        pages = list(parquet.pages_in(data[begin : begin + column.total_compressed_size]))
        assert sum(page.num_values for page in pages if not page.is_dictionary) == 5000 and len(pages) > 2
        assert sum(page.is_dictionary for page in pages) == column.has_dictionary_page


_DATA = b"\x15\xd0\x0f\x15\0\x15\6\x15\6\0"  # 1,000 values


@pytest.mark.parametrize(
    "header",
    [
        b"\x15\0\x15\xc8\1\x15\xc8\1\x2c" + _DATA + b"\x85\4\2\0",  # two sizes, of 100 and 1 bytes
        b"\x15\0\x16\xc8\1\x15\xc8\1\x2c" + _DATA + b"\0",  # a size of 64 bits
        b"\x15\0\x15\x80\x80\x80\x80\x10\x15\xc8\1\x2c" + _DATA + b"\0",  # of 33 bits
        b"\x15\0\x15\xc8\1\x15\xc8\1\x2c\x16" + _DATA[1:] + b"\0",  # as many values, of 64 bits
        b"\x15\6\x15\xc8\1\x15\xc8\1\x2c" + _DATA + b"\0",  # a page of version 2 with a header of version 1
        b"\x15\0\x15\xc8\1\x15\xc8\1\x2c" + _DATA + b"\5\x84\x80\x08\2\0",  # field 2 again, as 65,538
        b"\x15\0\x15\xc8\1\x15\xc8\1\x2c" + _DATA + b"\x59\xf7" + b"\xff" * 8 + b"\x0f\0",  # 2^60 numbers
    ],
)
def test_a_header_that_pyarrow_would_read_otherwise_is_refused(header: bytes):
    """pyarrow passes over a field of another type, and takes the last of several."""
    plain = b"\x15\0\x15\xc8\1\x15\xc8\1\x2c" + _DATA + b"\0"
    assert list(parquet.pages_in(bytearray(plain + bytes(100)))) == [(100, False, 1000, 0)]
    with pytest.raises(ValueError, match="no header of a page at byte 0"):
        list(parquet.pages_in(bytearray(header + bytes(100))))


def test_the_columns_of_a_row_group_are_freed_with_its_last_rows(tmp_path: Path):
    file = make_shard(tmp_path / "a", pq_bytes({"x": np.random.default_rng(0).random(500_000)}))
    reader = FixedBlockReader(loaderd.FixedRecords(np.dtype([("x", "<f8")])), [file], ["parquet"])
    block = Block(0, 4, file.size_bytes - 8, 500_000, 0, b"")
    tracemalloc.start()
    assert sum(piece.num_records for piece in reader.read(block, 0, 500_000))
    held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes > 4_000_000 > 1_000_000 + held_bytes
    reader.close()
