"""Lists of many lengths on their way: through loaders, frameworks, a server, and conversions to other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import loaderd
from loaderd import testing
from loaderd.errors import RecordMismatchError
from tests.decode.example_wire import bytes_list, entry, example, float_list, int64_list
from tests.helpers import commands
from tests.helpers.serving import Server

MODULE = """
import loaderd

schema = loaderd.Schema(
    {
        "id": loaderd.Int64(),
        "tokens": loaderd.Int64((8,), pad=-1, default=()),
        "num_tokens": loaderd.Length("tokens"),
        "clocks": loaderd.Float((6,), pad=0, cut=True),
        "words": loaderd.Raw("S6", (4,), pad=True, as_list=True),
        "num_words": loaderd.Length("words"),
    },
    {
        "id": loaderd.Array("id"),
        "tokens": loaderd.Array("tokens", dtype="int32"),
        "num_tokens": loaderd.Array("num_tokens"),
        "clocks": loaderd.Array("clocks"),
        "words": loaderd.Array("words"),
        "num_words": loaderd.Array("num_words", dtype="int64"),
        "mean": loaderd.Derived(
            lambda tokens, n: (tokens * (tokens >= 0)).sum(axis=1) / n.clip(1), ("tokens", "num_tokens")
        ),
    },
)
data = loaderd.Dataset("shards/*.tfrecord", schema, seed=3)
"""
SCOPE: dict[str, Any] = {}
exec(MODULE, SCOPE)
SCHEMA: loaderd.Schema = SCOPE["schema"]
WORDS = [b"pawn", b"knight", b"ox", b"x"]


def record(number: int) -> bytes:
    tokens = [] if number % 3 == 0 else [entry("tokens", int64_list(*range(number % 9)))]
    clocks = entry("clocks", float_list(*([0.5] * (number % 11))))
    return example(entry("id", int64_list(number)), *tokens, clocks, entry("words", bytes_list(*WORDS[: number % 5])))


def check(batch: Any) -> list[int]:
    """The ids of a batch, whose lists must be those of its records."""
    for place, number in enumerate(np.asarray(batch["id"]).tolist()):
        n = 0 if number % 3 == 0 else number % 9
        assert np.asarray(batch["tokens"])[place].tolist() == [*range(n)] + [-1] * (8 - n)
        assert (int(batch["num_tokens"][place]), int(batch["num_words"][place])) == (n, number % 5)
        assert np.count_nonzero(np.asarray(batch["clocks"])[place]) == min(6, number % 11)
        assert float(batch["mean"][place]) == (max(0, n - 1) / 2 if n else 0)
        if "words" in batch:  # which PyTorch and JAX have no dtype for
            assert np.asarray(batch["words"])[place].tolist() == WORDS[: number % 5] + [b""] * (4 - number % 5)
    return np.asarray(batch["id"]).tolist()  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    testing.write_shards(tmp_path / "shards", [record(number) for number in range(600)], num_shards=3)
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("kernels", ["compiled", "numpy"])
def test_a_loader(folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "compiled":
        monkeypatch.delenv("LOADERD_KERNELS")
    with loaderd.Loader(folder / "shards/*", SCHEMA, batch_size=50, workers=2) as loader:
        assert sorted(number for batch in loader for number in check(batch)) == [*range(600)]


def test_records_are_chosen_by_a_length(folder: Path) -> None:
    where = loaderd.Derived(lambda n: n > 2, "num_words")
    data = loaderd.Dataset(folder / "shards/*", SCHEMA, where=where)
    with loaderd.Loader(data, batch_size=50, workers=1) as loader:
        found = sorted(number for batch in loader for number in check(batch))
    assert found == [number for number in range(600) if number % 5 > 2]


def test_a_server(folder: Path) -> None:
    server = Server(folder, "mine:data", network=True)
    try:
        with loaderd.connect(server.address, "data", batch_size=50, workers=1) as served:
            found = [check(batch) for batch in served]
    finally:
        server.close()
    with loaderd.Loader(folder / "shards/*", SCHEMA, batch_size=50, workers=1, seed=3) as loader:
        assert found == [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("unpack", ["worker", "device"])
def test_tensorflow(folder: Path, unpack: Any) -> None:
    tf = pytest.importorskip("tensorflow")
    loaderd_tf = pytest.importorskip("loaderd_tf")
    dataset = loaderd_tf.make_dataset(str(folder / "shards/*"), SCHEMA, batch_size=50, unpack=unpack)
    if unpack == "device":
        text = dataset.map(lambda packed: packed["words"])
        dataset = dataset.map(
            lambda packed: loaderd_tf.unpack({name: x for name, x in packed.items() if name != "words"}, SCHEMA)
        )
        assert set(np.concatenate([*text.as_numpy_iterator()]).ravel()) == {b"", *WORDS}
    assert sorted(number for batch in dataset for number in check(batch)) == [*range(600)]
    batch = next(iter(dataset))
    ragged = tf.RaggedTensor.from_tensor(batch["tokens"], lengths=batch["num_tokens"])
    assert ragged.row_lengths().numpy().tolist() == batch["num_tokens"].numpy().tolist()


def test_a_list_that_is_too_long_is_an_error_of_its_record(folder: Path) -> None:
    testing.write_shards(folder / "long", [record(1), example(entry("id", int64_list(2))), record(4)])
    long = example(entry("id", int64_list(7)), entry("tokens", int64_list(*range(9))))
    (path,) = testing.write_shards(folder / "long", [record(1), long, record(4)])
    with (
        loaderd.Loader(path, SCHEMA, batch_size=3, workers=1) as loader,
        pytest.raises(RecordMismatchError) as raised,
    ):
        next(iter(loader))
    (damage,) = raised.value.damages
    assert (damage.record, damage.expected, damage.found) == (1, "feature 'tokens' of at most 8 values", "9 values")
    assert "cut=True" in str(raised.value)


@pytest.mark.parametrize("format", ["tfrecord", "records", "npz"])
def test_converted(folder: Path, format: str) -> None:
    commands.run("convert", "shards/*", "--schema", "mine:schema", "--to", "to", "--format", format, folder=folder)
    schema = SCHEMA.as_examples() if format == "tfrecord" else SCHEMA.as_records()
    with loaderd.Loader(folder / "to/shard-*", schema, batch_size=50, workers=1) as loader:
        assert sorted(number for batch in loader for number in check(batch)) == [*range(600)]


def test_a_proposed_schema_reads_them(folder: Path) -> None:
    module = commands.run("inspect", "shards/*", "--features", "--sample", 600, folder=folder).stdout
    assert '"tokens": loaderd.Int64((8,), default=(), pad=-1),' in module
    assert '"words": loaderd.Raw("S6", (4,), pad=True, as_list=True),' in module
    names: dict[str, Any] = {}
    exec(module, names)
    with loaderd.Loader(folder / "shards/*", names["schema"], batch_size=600, shuffle=False, workers=1) as loader:
        (batch,) = loader
        assert batch["words_length"].tolist() == [number % 5 for number in range(600)]
        assert batch["tokens_length"].tolist() == [number % 9 if number % 3 else 0 for number in range(600)]


def test_parquet_is_read_by_a_proposal_and_converted(folder: Path) -> None:
    from pyarrow import parquet

    columns = {
        "tokens": [[*range(number % 9)] for number in range(600)],
        "words": [[word.decode() for word in WORDS[: number % 5]] for number in range(600)],
    }
    for part in range(2):
        own = {name: values[part * 300 :][:300] for name, values in columns.items()}
        if not part:  # shorter lists than those of the second file, and shorter words
            own = {"tokens": [row[:5] for row in own["tokens"]], "words": [row[:1] for row in own["words"]]}
            columns = {name: [*own[name], *values[300:]] for name, values in columns.items()}
        parquet.write_table(pa.table(own), folder / f"{part}.parquet", row_group_size=70)
    module = commands.run("inspect", "0.parquet", "1.parquet", "--features", folder=folder).stdout
    assert "is of another kind" not in module and 'loaderd.Raw("int64", (8,), pad=-1)' in module
    (folder / "proposed.py").write_text(f"{module}examples, records = schema.as_examples(), schema.as_records()\n")
    names: dict[str, Any] = {}
    exec(module, names)
    schema: loaderd.Schema = names["schema"]
    convert = ("convert", "[01].parquet", "--schema", "proposed:schema", "--to")
    commands.run(*convert, "a", folder=folder)
    commands.run(*convert, "b", "--format", "npz", folder=folder)
    commands.run("convert", "b/*.npz", "--schema", "proposed:records", "--to", "c", folder=folder)
    for shards, one in (
        ("[01].parquet", schema),
        ("a/*.tfrecord", schema.as_examples()),
        ("b/*.npz", schema.as_records()),
        ("c/*.tfrecord", schema.as_examples()),
    ):
        with loaderd.Loader(folder / shards, one, batch_size=600, shuffle=False, workers=1) as loader:
            (batch,) = loader
        for name, values in columns.items():
            lengths = batch[f"{name}_length"].tolist()
            found = [[*row[:length]] for row, length in zip(batch[name].tolist(), lengths, strict=True)]
            assert found == [[each.encode() if isinstance(each, str) else each for each in row] for row in values]
