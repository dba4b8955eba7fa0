"""Values of records, computed block by block: against a plain loop over all records, of shards of every kind."""

from __future__ import annotations

import gzip
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

import loaderd
from loaderd.errors import OptionError, SchemaError
from loaderd.formats import fixed_index
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.indexer import make_indexes
from loaderd.formats.shard_index import ShardIndex, decode_indexes, encode_indexes
from loaderd.ipc.worker_messages import IndexTask
from loaderd.options import Storage
from loaderd.schema.record_values import RecordValues
from loaderd.storage.files import list_shards
from loaderd.testing import damage
from loaderd.worker import value_pass
from loaderd.worker.task_runner import index_group
from loaderd.worker.value_pass import ValuePass
from tests.helpers.fixed_files import SCHEMA as FIXED
from tests.helpers.fixed_files import npz_of, parquet_of, records_from, tar_of, write_all
from tests.helpers.numbered import SCHEMA, Numbered


def passing(indexes: Sequence[ShardIndex]) -> list[list[int]]:
    """The numbers of the records of each index whose bit is set."""
    bits = [np.unpackbits(index.passing, count=index.end, bitorder="little") for index in indexes]
    return [np.flatnonzero(of_shard).tolist() for of_shard in bits]


def made(values: RecordValues, paths: Sequence[Path], block_records: int, records: Any = None) -> list[ShardIndex]:
    files = list_shards([str(path) for path in paths])
    return make_indexes(files, records, block_records, values=ValuePass(values))


def values_of(function: Callable[..., Any], *inputs: str, schema: loaderd.Schema = SCHEMA) -> RecordValues:
    return RecordValues.of(schema, loaderd.Derived(function, inputs))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    block_records=st.integers(1, 50),
    at_a_time=st.integers(1, 100),
    divisor=st.integers(1, 12),
    is_gzip=st.booleans(),
)
def test_each_record_gets_its_own_bit(
    numbered: Numbered, sizes: list[int], block_records: int, at_a_time: int, divisor: int, is_gzip: bool
):
    paths = numbered.write(sizes)
    for path in paths if is_gzip else []:
        path.write_bytes(gzip.compress(path.read_bytes()))
    values = values_of(lambda bits, id: (id % divisor == 0) & (bits[:, 31] == id % 2), "bits", "id")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_pass, "_ROWS_AT_A_TIME", at_a_time)
        indexes = made(values, paths, block_records)
    firsts = [0, *itertools.accumulate(sizes)]
    expected = [
        [number - first for number in range(first, stop) if number % divisor == 0]
        for first, stop in itertools.pairwise(firsts)
    ]
    assert passing(indexes) == expected == passing(decode_indexes(encode_indexes(indexes)))


@pytest.mark.parametrize("block_records", [7, 1024])
def test_records_of_fixed_size_in_every_wrapping(tmp_path: Path, block_records: int):
    records = write_all(tmp_path)
    paths = [Path(file.path) for file in list_shards([str(tmp_path / "*-*")])]
    values = values_of(
        lambda number, planes: (number % 3 == 0) & (planes[:, 0] > 20), "number", "planes", schema=FIXED
    )
    assert FIXED.records is not None
    expected = int(((records["number"] % 3 == 0) & (records["planes"][:, 0] > 20)).sum())
    by_shard = [made(values, [path], block_records, FIXED.records)[0] for path in paths]
    assert sum(index.num_passing for index in by_shard) == expected > 0
    assert passing(made(values, paths, block_records, FIXED.records)) == passing(by_shard)
    games = [tmp_path / f"{number}.gz" for number in range(3)]
    for number, game in enumerate(games):
        game.write_bytes(gzip.compress(records[20 * number : 20 * number + 15].tobytes()))
    by_game = [made(values, [game], block_records, FIXED.records)[0] for game in games]
    assert passing(made(values, games, block_records, FIXED.records)) == passing(by_game) != [[], [], []]


def test_what_is_damaged_has_no_bit_and_what_does_not_fit_passes(numbered: Numbered):
    (path,) = numbered.write([60])
    with open(path, "r+b") as file:
        file.seek(damage(path, record=12) - 5)  # the last byte of record 11
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    assert passing(made(values_of(lambda id: id < 9, "id"), [path], 16)) == [[*range(9), 11, 12]]
    # Nothing has the feature: the loader will say so, at each record.
    other = loaderd.Schema({"other": loaderd.Int64()}, {"other": loaderd.Array("other")})
    assert len(passing(made(values_of(lambda other: other < 0, "other", schema=other), [path], 16))[0]) == 60


def evens_but(low: int, high: int) -> RecordValues:
    """Raises at numbers from ``low`` to ``high`` - 1."""

    def function(number: Any) -> Any:
        if ((number >= low) & (number < high)).any():
            raise ValueError("no record")
        return number % 2 == 0

    return values_of(function, "number", schema=FIXED)


def test_records_that_turn_out_to_be_none_are_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the end of what is compressed tells that it is damaged: then its records have been seen already."""
    monkeypatch.setattr(fixed_index, "_MAX_AT_ONCE_BYTES", 0)  # what is small is inflated before it is looked at
    monkeypatch.setattr(value_pass, "_ROWS_AT_A_TIME", 4)
    games = [gzip.compress(records_from(first, 10).tobytes()) for first in (200, 51, 300)]
    games[1] = games[1][:-8] + bytes(8)
    tar = tmp_path / "a.tar"
    tar.write_bytes(tar_of([(f"{number}.gz", game) for number, game in enumerate(games)]))
    (index,) = made(evens_but(53, 100), [tar], 7, FIXED.records)
    assert len(index.damages) == 1 and index.num_records == 20
    assert passing([index]) == [[*range(0, 10, 2), 10, *range(11, 21, 2)]]

    arrays = npz_of(records_from(50, 30))
    at = arrays.index(b"number.npy") + 60
    paths = [tmp_path / name for name in ("b", "c.npz", "d")]
    for path, data in zip(
        paths, [records_from(200, 9).tobytes(), arrays, records_from(301, 9).tobytes()], strict=True
    ):
        path.write_bytes(data)
    paths[1].write_bytes(arrays[:at] + bytes([arrays[at] ^ 1]) + arrays[at + 1 :])
    indexes = made(evens_but(53, 100), paths, 7, FIXED.records)
    assert indexes[1].error is not None and passing(indexes) == [[*range(0, 9, 2)], [], [*range(1, 9, 2)]]


def test_a_damaged_row_group_passes(tmp_path: Path):
    """The loader will meet it: the index of a Parquet file is made of what it says of itself."""
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_of(records_from(200, 60)))
    group = pq.ParquetFile(path).metadata.row_group(1)
    begin = min(group.column(number).data_page_offset for number in range(1, group.num_columns))
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(bytes(40))
    (index,) = made(evens_but(0, 0), [path], 7, FIXED.records)
    assert passing([index]) == [[*range(0, 20, 2), *range(20, 40), *range(40, 60, 2)]]


def test_what_cannot_be_decoded_passes_unless_it_is_much(numbered: Numbered):
    (path,) = numbered.write([300])

    def decoded(lowest: int) -> loaderd.Schema:
        def half(id: Any) -> Any:
            if (id >= lowest).any():
                raise ValueError("too large")
            return id // 2

        return loaderd.Schema(SCHEMA.features, {**SCHEMA.fields, "half": loaderd.Derived(half, "id", (), "int64")})

    expected = [*range(30), *range(290, 300)]
    assert passing(made(values_of(lambda half: half < 15, "half", schema=decoded(290)), [path], 300)) == [expected]
    byte = loaderd.Schema(SCHEMA.features, {**SCHEMA.fields, "byte": loaderd.Array("id", dtype="uint8")})
    expected = [*range(30), *range(256, 288)]
    fewer = numbered.write([288], "fewer")
    assert passing(made(values_of(lambda byte: byte < 30, "byte", schema=byte), fewer, 300)) == [expected]
    with pytest.raises(OptionError, match="record 256: expected a bool of where="):
        made(values_of(lambda byte: byte < 30, "byte", schema=byte), [path], 300)

    def never_seen(half: Any) -> Any:
        if 2 in half:
            raise KeyError("never seen")
        return half > 0

    with pytest.raises(OptionError, match=r"record 4: expected.*never seen"):
        made(values_of(never_seen, "half", schema=decoded(290)), [path], 300)


def test_records_are_decoded_in_parts(numbered: Numbered, monkeypatch: pytest.MonkeyPatch):
    (path,) = numbered.write([1000])
    monkeypatch.setattr(value_pass, "_ROWS_AT_A_TIME", 64)
    sizes: list[int] = []
    values = values_of(lambda id: sizes.append(len(id)) or id % 3 == 0, "id")
    assert passing(made(values, [path], 1000)) == [[*range(0, 1000, 3)]] and max(sizes) == 64


def every_third(id: Any) -> Any:
    return id % 3 == 0


def test_a_worker_says_before_each_call_that_it_goes_on(numbered: Numbered, monkeypatch: pytest.MonkeyPatch):
    """All that is said of a small file itself is that it was read; its functions may take minutes."""
    monkeypatch.setattr(value_pass, "_ROWS_AT_A_TIME", 64)
    values = pickle.dumps(values_of(every_third, "id"))
    files = list_shards([str(path) for path in numbered.write([1000])])
    said: dict[bytes, int] = {}
    for each in (b"", values):
        read: list[int] = []
        index_group(IndexTask(tuple(files), IndexCache("none", 1000), pickle.dumps(Storage()), each), read.append)
        said[each] = len(read)
    assert said[values] == said[b""] + -(-1000 // 64)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    values=st.lists(st.one_of(st.just(-0.0), st.floats(2**-14, 65504), st.floats(2**-14, 1)), min_size=9, max_size=9),
    with_where=st.booleans(),
)
def test_each_record_gets_its_own_weight(numbered: Numbered, sizes: list[int], values: list[float], with_where: bool):
    paths = numbered.write(sizes)
    where = loaderd.Derived(lambda bits: bits[:, 31] == 1, "bits") if with_where else None
    weights = np.array(values)
    # Where a record does not pass, its weight may be none.
    weight = loaderd.Derived(lambda id: np.where(with_where & (id % 2 == 0), np.nan, weights[id % 9]), "id")
    indexes = made(RecordValues.of(SCHEMA, where, weight), paths, 7)
    for index, again in zip(indexes, decode_indexes(encode_indexes(indexes)), strict=True):
        assert again.weights.tolist() == index.weights.tolist() and len(again.passing) == len(index.passing)
    numbers = np.arange(sum(sizes))
    expected = np.abs(weights[numbers % 9].astype(np.float16))
    expected[with_where & (numbers % 2 == 0)] = 0
    found = np.concatenate([index.weights.astype(np.uint16) for index in indexes]).view(np.float16)
    assert np.array_equal(found, expected)
    total = sum(index.total_weight for index in indexes)
    assert np.isclose(total, expected.astype(float).sum())
    indexes[0].weights = np.full(len(indexes[0].weights), np.inf, np.float16).view(np.uint16)
    with pytest.raises(ValueError, match="its weights are none"):
        decode_indexes(encode_indexes(indexes))


def test_what_cannot_be_decoded_weighs_1(numbered: Numbered):
    (path,) = numbered.write([60])
    other = loaderd.Schema({"other": loaderd.Int64()}, {"other": loaderd.Array("other")})
    assert made(RecordValues.of(other, None, "other"), [path], 16)[0].total_weight == 60


def fails_at(number: int) -> Callable[..., Any]:
    def function(id: Any) -> Any:
        if number in id:
            raise ValueError("never seen")
        return id > 0

    return function


@pytest.mark.parametrize(
    ("function", "record", "found"),
    [
        (fails_at(77), 17, "ValueError: never seen"),
        (lambda id: (id > 0) if 33 not in id else id, 33, "an array of int64 of shape (1,)"),
        (lambda id: np.ones((len(id), 1), bool), 0, "an array of bool of shape (1, 1)"),
        (lambda id: True, 0, "True, which it returned for 1 record"),
        (lambda id: id.sort(), 0, "read-only"),
    ],
)
def test_the_first_record_at_which_it_fails_is_named_with_the_function(
    numbered: Numbered, function: Any, record: int, found: str
):
    paths = numbered.write([60, 60])
    with pytest.raises(OptionError) as caught:
        made(values_of(function, "id"), paths, 16)
    (damage,) = caught.value.damages
    assert (damage.shard, damage.record) == (str(paths[found.startswith("ValueError")]), record)
    assert found in damage.found and function.__qualname__ in damage.expected


def test_inputs_that_do_not_exist_or_are_drawn_at_random_are_refused():
    with pytest.raises(SchemaError, match="'score' is no field, intermediate or stored feature; there are bits, id"):
        values_of(lambda score: score > 0, "score")
    drawn = loaderd.Derived(lambda id, random: random.integers(0, 2), "id", (), "int64", random=True)
    schema = loaderd.Schema(SCHEMA.features, {**SCHEMA.fields, "drawn": drawn})
    with pytest.raises(SchemaError, match="'drawn' is drawn at random"):
        values_of(lambda drawn: drawn > 0, "drawn", schema=schema)
    for wrong in ({"shape": (2,)}, {"dtype": "int8"}, {"random": True}):
        with pytest.raises(SchemaError, match="must return a bool for each record"):
            RecordValues.of(SCHEMA, loaderd.Derived(lambda *_: True, "id", **wrong))


def test_the_key_tells_tables_from_others():
    table = np.arange(4)

    def key(definition: Any) -> str | None:
        schema = loaderd.Schema({"bits": loaderd.PackedBits(8)}, {"x": definition})
        return values_of(lambda x: x > 0, "x", schema=schema).key

    fields = [
        definition
        for values in (table, table[::-1])
        for definition in (
            loaderd.Sparse("bits", 4, values),
            loaderd.Codes("bits", 2, (4,), values),
            loaderd.PrefixCodes("bits", ["0", "10", "110", "111"], (2,), values),
            loaderd.Planes([loaderd.Bits("bits", (4,), scale=values)]),
        )
    ]
    keys = [*map(key, fields)]
    assert None not in keys and len({*keys}) == len(keys)
    assert keys == [*map(key, fields)]
