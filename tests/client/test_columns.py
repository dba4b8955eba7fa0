"""Files that belong together: matched by name, joined row by row, and read like any shard."""

from __future__ import annotations

import gzip
import io
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

import loaderd
from loaderd.cli.main import main
from loaderd.errors import LoaderdError, NoShardsError, OptionError, SchemaError, ShardReadError
from loaderd.formats import columns as columns_reader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.storage.columns import list_columns
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile
from tests.formats.test_tables import read
from tests.helpers.fixed_files import zstd
from tests.reliability import fixed_cases
from tests.reliability.mutate import BYTES

SHOTS, DETECTORS = 150, 37
RECORD = np.dtype([("detections", "u1", (5,)), ("observables", "u1", (1,))])
SCHEMA = loaderd.Schema(
    loaderd.FixedRecords(RECORD, bits=["detections", "observables"]),
    {
        "detections": loaderd.Bits("detections", (DETECTORS,), dtype="bool", bit_order="little"),
        "flipped": loaderd.Bits("observables", (1,), dtype="bool", bit_order="little"),
    },
)


def write_b8(path: Path, bits: Any) -> None:
    """As Stim does: ceil(n / 8) bytes a shot, the least significant bit first."""
    path.write_bytes(np.packbits(bits, axis=1, bitorder="little").tobytes())


@pytest.fixture
def shots(tmp_path: Path) -> tuple[loaderd.Dataset, Any, Any]:
    """A data set of three shards; what its shots detect, and the observables."""
    rng, detections, flipped = np.random.default_rng(0), [], []
    for name in ("a", "b", "c"):
        detections.append(rng.random((SHOTS, DETECTORS)) < 0.3)
        flipped.append(rng.random((SHOTS, 1)) < 0.5)
        write_b8(tmp_path / f"{name}.detection.b8", detections[-1])
        write_b8(tmp_path / f"{name}.obs.b8", flipped[-1])
    columns = loaderd.Columns(
        detections=tmp_path / "*.detection.b8",
        observables=tmp_path / "*.obs.b8",
    )
    shuffle = loaderd.Shuffle(window_records=100, block_records=16)
    dataset = loaderd.Dataset(columns, SCHEMA, shuffle=shuffle, index_cache=f"{tmp_path}.index")
    return dataset, np.concatenate(detections), np.concatenate(flipped)


def rows_of(batches: Any) -> list[bytes]:
    return [
        np.concatenate([batch["detections"], batch["flipped"]], axis=1)[number].tobytes()
        for batch in batches
        for number in range(batch.num_records)
    ]


def test_each_shot_comes_once_with_its_own_labels_and_a_resume_goes_on(shots: Any):
    dataset, detections, flipped = shots
    options: dict[str, Any] = {"batch_size": 40, "epochs": 2, "workers": 2}
    with loaderd.Loader(dataset, **options) as loader:
        every = rows_of(loader)
    written = [row.tobytes() for row in np.concatenate([detections, flipped], axis=1)]
    assert sorted(every) == sorted(2 * written) and every[:450] != written
    for batches in (1, 7, 12, 20):
        with loaderd.Loader(dataset, **options) as loader:
            first = rows_of(islice(loader, batches))
            position = loader.position
        with loaderd.Loader(dataset, **options, start=position) as loader:
            assert first + rows_of(loader) == every
    hosts = [loaderd.Loader(dataset, batch_size=40, epochs=1, workers=1, shard=(host, 2)) for host in range(2)]
    assert sorted(row for host in hosts for row in rows_of(host)) == sorted(written)


def test_a_partner_that_is_missing_and_lengths_that_differ_are_named(shots: Any, tmp_path: Path):
    dataset, *_ = shots
    labels = tmp_path / "b.obs.b8"
    data = labels.read_bytes()
    labels.write_bytes(data[:-3])
    said = rf"{labels}: .* as many rows as {tmp_path}/b.detection.b8, which belongs to it, 150, found 147 rows"
    with pytest.raises(ShardReadError, match=said):
        loaderd.Loader(dataset, batch_size=10)
    labels.unlink()
    said = rf"{tmp_path}/b.detection.b8 has no partner: {labels} does not exist, of the column 'observables'"
    with pytest.raises(NoShardsError, match=said):
        loaderd.Loader(dataset, batch_size=10)
    labels.write_bytes(data)
    (tmp_path / "d.obs.b8").write_bytes(data)
    with pytest.raises(NoShardsError, match=rf"d.obs.b8 has no partner: {tmp_path}/d.detection.b8 does not exist"):
        loaderd.Loader(dataset, batch_size=10)


def test_a_plain_file_that_is_named_twice_is_an_error(tmp_path: Path):
    records = np.zeros(7, [("x", "<u2"), ("y", "<u2")])
    columns, out = loaderd.Columns(x=tmp_path / "both", y=tmp_path / "both"), io.BytesIO()
    schema = loaderd.Schema(loaderd.FixedRecords(records.dtype), {"x": loaderd.Array("x"), "y": loaderd.Array("y")})
    np.savez(out, x=records["x"], y=records["y"])
    (tmp_path / "both").write_bytes(out.getvalue())
    loaderd.Loader(columns, schema, batch_size=1, index_cache="none").close()
    (tmp_path / "both").write_bytes(records["x"].tobytes())
    with pytest.raises(ShardReadError, match=rf"{tmp_path}/both: .* column 'y', .* found that of column 'x', too"):
        loaderd.Loader(columns, schema, batch_size=1, index_cache="none")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_compressed_column_that_is_too_large_or_damaged_is_refused(kind: str, shots: Any, tmp_path: Path):
    dataset, detections, _ = shots
    path = tmp_path / "b.detection.b8"
    stored = zstd(path.read_bytes()) if kind == "zstd" else gzip.compress(path.read_bytes())
    path.write_bytes(stored)
    assert SCHEMA.records is not None
    found = read(list_shards(dataset.shards)[1], SCHEMA.records)["detections"]
    assert found.tobytes() == np.packbits(detections[SHOTS : 2 * SHOTS], axis=1, bitorder="little").tobytes()
    for data, most in ((stored[:-9], columns_reader.MAX_WHOLE_BYTES), (stored, 700), (stored, 5)):
        path.write_bytes(data)
        with mock.patch.object(columns_reader, "MAX_WHOLE_BYTES", most), pytest.raises(ShardReadError) as raised:
            read(list_shards(dataset.shards)[1], SCHEMA.records)
        assert f"{path}: record 0" in str(raised.value) and f"a column in {kind} of at most {most:,}" in str(
            raised.value
        )


def test_what_columns_cannot_be():
    with pytest.raises(OptionError, match="got none"):
        loaderd.Columns()
    with pytest.raises(OptionError, match="as many wildcards each"):
        loaderd.Columns(a="*.a", b="*/*.b")
    with pytest.raises(OptionError, match="shards must be a path"):
        loaderd.Columns(a=["x", "y"])
    with pytest.raises(OptionError, match="the schema of Columns must be one of FixedRecords"):
        loaderd.Dataset(loaderd.Columns(a="*.a"), loaderd.schemas.chess_eval())
    for names in (
        {"detections": "a"},
        {"detections": "a", "x": "b", "y": "c"},
        {"detections": "a", "observables": "b", "x": "c"},
    ):
        with pytest.raises(SchemaError, match="Columns must name the fields of FixedRecords"):
            loaderd.Dataset(loaderd.Columns(**names), SCHEMA)
    columns = loaderd.Columns(a="*.a", b="s3://key:secret@x/*.b")
    assert columns == loaderd.Columns(a="*.a", b="s3://key:secret@x/*.b") != loaderd.Columns(a="*.a", b="*.c")
    assert "secret" not in repr(columns)


def written(array: Any, name: str, how: str, block: int) -> bytes:
    out = io.BytesIO()
    if how == "npy":
        np.save(out, array)
    elif how == "npz":
        np.savez_compressed(out, **{name: array})
    elif how == "parquet":
        lists = pa.FixedSizeListArray.from_arrays(array.reshape(-1), array.shape[1])
        pq.write_table(pa.table({name: lists}), out, row_group_size=block)
    whole = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd}.get(how)
    return out.getvalue() if whole is None else whole(array.tobytes())


KINDS = st.sampled_from(["plain", "npy", "npz", "parquet", "gzip", "zstd"])


@given(kinds=st.tuples(KINDS, KINDS, KINDS), rows=st.integers(1, 50), seed=st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_any_kinds_are_joined_as_numpy_would(tmp_path, kinds, rows, seed):
    rng = Random(seed)
    dtype = np.dtype([("x", "<i4", (2,)), ("y", "u1", (3,)), ("z", "<f4", (1,))])
    records = np.frombuffer(np.random.default_rng(seed).bytes(rows * dtype.itemsize), dtype)
    for name, how in zip("xyz", kinds, strict=True):
        (tmp_path / name).write_bytes(written(records[name], name, how, rng.randint(1, rows)))
    names = ["x", "y", "z"]
    rng.shuffle(names)
    (file,) = list_shards(loaderd.Columns(**{name: tmp_path / name for name in names}))
    assert read(file, loaderd.FixedRecords(dtype), rng).tobytes() == records.tobytes()


def test_files_match_by_all_that_wildcards_stand_for(tmp_path: Path):
    for folder in ("r1", "r2/deep"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("a1", "b2"):
            (tmp_path / folder / f"{name}.x").write_bytes(bytes(7))
            (tmp_path / folder / f"lab-{name[0]}-{name[1]}.y").write_bytes(bytes(7))
    columns = loaderd.Columns(x=tmp_path / "**/[ab]?.x", y=tmp_path / "**/lab-[ab]-?.y")
    found = [
        [Path(part.uri).relative_to(tmp_path).as_posix() for part in file.parts] for file in list_shards(columns)
    ]
    assert found == [
        [f"{folder}/{a}{b}.x", f"{folder}/lab-{a}-{b}.y"] for folder in ("r1", "r2/deep") for a, b in ("a1", "b2")
    ]


@pytest.mark.parametrize("prefix", ["", "./", "sub/..//", "file://{}/", "{}/./"])
def test_globs_are_matched_however_they_are_written(tmp_path: Path, monkeypatch: Any, prefix: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in "abc":
        for ending in "xy":
            (tmp_path / f"{name}.{ending}").write_bytes(bytes(7))
    prefix = prefix.format(tmp_path)
    found = list_shards(loaderd.Columns(x=f"{prefix}*.x", y=f"{prefix}*.y"))
    assert [[part.uri for part in file.parts] for file in found] == [
        [f"{tmp_path}/{name}.{ending}" for ending in "xy"] for name in "abc"
    ]


def test_files_that_one_key_would_match_are_refused():
    files = [ShardFile(f"s3://bucket/{name}.x", 7, 0) for name in "ab"]
    with pytest.raises(OptionError, match=r"stand for the same in s3://bucket/a.x and s3://bucket/b.x"):
        list_columns(loaderd.Columns(x="s3://bucket//*.x"), lambda pattern: files)


def test_a_name_that_is_no_field_has_all_the_others(tmp_path: Path):
    table = pa.table({"x": np.arange(100), "y": np.arange(100, dtype="f4"), "other": [None] * 100})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    np.save(tmp_path / "a.npy", np.arange(100, 200, dtype="u1"))
    schema = loaderd.Schema.of_stored(loaderd.FixedRecords(np.dtype([("x", "<i8"), ("label", "u1"), ("y", "<f4")])))
    columns = loaderd.Columns(table=tmp_path / "*.parquet", label=tmp_path / "*.npy")
    with loaderd.Loader(columns, schema, batch_size=100, shuffle=False, index_cache="none") as loader:
        (batch,) = loader
        assert (
            batch["x"].tolist() == batch["y"].tolist() == (batch["label"].astype(int) - 100).tolist() == [*range(100)]
        )


def test_the_commands_take_columns(shots: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    columns = ["--columns", f"detections={tmp_path}/*.detection.b8", f"observables={tmp_path}/*.obs.b8"]
    schema = ["--schema", "tests.client.test_columns:SCHEMA"]

    def command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    assert command("verify", *columns, *schema)[0] == 0
    assert "compression columns" in command("inspect", *columns, *schema)[1]
    status, said = command("verify", *columns)
    assert status == 1 and "need a schema of FixedRecords" in said
    status, said = command("inspect", *columns, "--features")
    assert status == 2 and "of an unknown number of rows" in said
    np.save(tmp_path / "a.weights.npy", np.arange(SHOTS, dtype="f4"))
    single = [each.replace("*", "a") for each in columns]
    text = command("inspect", *single, f"weight={tmp_path}/a.weights.npy", "--features")[1]
    assert '("detections", "uint8", (5,)),' in text and '("weight", "float32", ()),' in text
    assert (
        command("convert", *columns, *schema, "--to", f"{tmp_path}/out", "--format", "npz", "--processes", "1")[0]
        == 0
    )
    _, detections, flipped = shots
    with loaderd.Loader(f"{tmp_path}/out/*.npz", SCHEMA, batch_size=450, shuffle=False) as loader:
        (batch,) = loader
        assert (batch["detections"] == detections).all() and (batch["flipped"] == flipped).all()


def test_mutated_files_give_an_error_or_rows_of_theirs(tmp_path: Path):
    """Nothing tells whether plain bytes are as they were written: a row has what stands at its place in each file."""
    rng, refused = Random("columns"), 0
    detections = rng.randbytes(5 * 60)
    labels = written(np.frombuffer(rng.randbytes(60), "u1").reshape(60, 1), "observables", "parquet", 25)
    fixed_cases._forget_peak()
    before_mib = fixed_cases._peak_mib()
    for number in range(250):
        data = {"detections": detections, "observables": labels}
        changed = rng.choice([*data])
        data[changed] = rng.choice(list(BYTES.values()))(data[changed], rng, data[changed])
        for name, content in data.items():
            (tmp_path / f"{number}.{name}").write_bytes(content)
        (file,) = list_shards(loaderd.Columns(**{name: tmp_path / f"{number}.{name}" for name in data}))
        records = SCHEMA.records
        assert records is not None
        try:
            found = read(file, records)
        except LoaderdError as error:
            assert isinstance(error, ShardReadError) and f"{tmp_path}/{number}." in str(error)
            refused += 1
            continue
        index = build_fixed_index(file, records, 7)
        assert index.num_records == len(found) == len(data["detections"]) // 5
        assert found["detections"].tobytes() == data["detections"]
    assert 50 < refused < 240 and fixed_cases._peak_mib() - before_mib < 100
