"""``loaderd inspect`` of shards that are no TFRecords: of files, tars and npz, with a schema and without."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import loaderd
from loaderd import testing
from loaderd.cli.main import main
from loaderd.schemas import kata, leela
from tests.formats.test_kinds import VIRIFORMAT
from tests.helpers import nnue_boards, shogi_boards
from tests.helpers.fixed_files import DTYPE, WRAPPINGS, records_from, tar_of, wrapped, zstd
from tests.schemas.test_ceres import records as ceres_records

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def inspect(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    """The exit status, and what is printed."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    out, error = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, error


def inspected(capsys: Capture, *arguments: Any) -> dict[str, Any]:
    status, out, error = inspect(capsys, *arguments, "--json")
    assert status == 0, error
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    return found


def leela_game(num_records: int, input_format: int = 1) -> bytes:
    records = np.zeros(num_records, leela.RECORD_V6)
    records["version"], records["input_format"], records["plies_left"] = 6, input_format, np.arange(num_records)
    records["planes"][:, 0] = 0x80
    return gzip.compress(records.tobytes())


@pytest.mark.parametrize("how", WRAPPINGS)
def test_records_as_a_schema_has_them(how: str, tmp_path: Path, capsys: Capture):
    records = records_from(0, 60)
    (tmp_path / "a").write_bytes(wrapped(records, how))
    told = inspected(capsys, tmp_path / "a", "--schema", "tests.helpers.fixed_files:SCHEMA", "--record", 33)
    assert (told["compression"], told["records"], told["record_bytes"]) == (how, 60, DTYPE.itemsize)
    assert told["blocks"] == {"tar": [10] * 6, "parquet": [20] * 3, "arrow": [20] * 3}.get(how, [60])
    assert told["features"]["values"] == {"dtype": "float32", "shape": [3]}
    assert told["values"]["number"] == [33] and told["values"]["planes"] == [records["planes"][33].tobytes().hex()]
    assert told["fields"]["values"] == records["values"][33].tolist()
    assert told["fields"]["bits"] == np.unpackbits(records["planes"][33]).tolist()


def test_games_of_leela_tell_what_they_are_and_what_is_wrong_with_them(tmp_path: Path, capsys: Capture):
    shard = tmp_path / "a.tar"
    members = [("LICENSE", b"ODbL"), ("0.gz", b"hello"), ("1.gz", leela_game(3)), ("2.gz", leela_game(9)[:-9])]
    shard.write_bytes(tar_of(members))
    told = inspected(capsys, shard, "--schema", "lc0")
    assert told["record"] == 1 and told["values"]["version"] == [6], "the first healthy one"
    told = inspected(capsys, shard)
    assert told["schema"] == "loaderd.schemas.lc0(), recognized by the content"
    assert [damage["record"] for damage in told["damages"]] == [0, 4 + told["records"] - 3]
    status, text, _ = inspect(capsys, shard, "--record", 3)
    assert status == 0 and "2 members of 3 to " in text and "\n2 damages, the first: " in text
    assert "'0.gz'" in text and "plies_left: float32 ()\n2.\n" in text
    assert "plane 0           plane 104" not in text and "plane 0   " in text
    assert inspect(capsys, shard, "--png", tmp_path / "board.png")[0] == 0 and (tmp_path / "board.png").stat().st_size
    assert "schema = loaderd.schemas.lc0()\n" in inspect(capsys, shard, "--features")[1]


def test_games_that_the_schema_refuses_are_counted(tmp_path: Path, capsys: Capture):
    games = [
        ("0.gz", leela_game(3)),
        ("1.gz", leela_game(4, 3)),
        ("2.gz", leela_game(5, 77)),
        ("3.gz", leela_game(6, 3)),
    ]
    (tmp_path / "a.tar").write_bytes(tar_of(games))
    refused = {f"input_format {number} where 1 is expected": count for number, count in ((3, 10), (77, 5))}
    assert inspected(capsys, tmp_path / "a.tar")["refused"] == refused
    assert (
        "\n10 records in members that begin with one that it refuses: input_format 3 where 1 is"
        in inspect(capsys, tmp_path / "a.tar")[1]
    )
    (tmp_path / "b.tar").write_bytes(tar_of(games[:1]))
    for names in ([tmp_path / "*.tar"], [tmp_path / "a.tar", tmp_path / "b.tar"]):
        assert inspect(capsys, *names)[1].startswith(f"Of several shards, the first:\n{tmp_path}/a.tar: 18 healthy")
    (tmp_path / "a.gz").write_bytes(games[2][1])
    status, _, error = inspect(capsys, tmp_path / "a.gz")
    assert status == 2 and "records of lc0 with input_format 77, which no schema reads" in error


@pytest.mark.parametrize("variant", ["bullet", "marlin", "nnue_bin"])
def test_boards_of_nnue_trainers_are_recognized(variant: str, tmp_path: Path, capsys: Capture):
    data = nnue_boards.records(variant, nnue_boards.positions(40))
    for name, stored in (("a.bin", data), ("a.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(stored)
        told = inspected(capsys, tmp_path / name, "--record", 33)
        assert told["schema"] == f"loaderd.schemas.{variant}(), recognized by the content"
        assert told["records"] == 40 and abs(told["fields"]["score"]) == 33
    assert f"schema = loaderd.schemas.{variant}()\n" in inspect(capsys, tmp_path / "a.bin", "--features")[1]
    (tmp_path / "b.bin").write_bytes(np.random.default_rng(0).bytes(len(data)))
    status, _, error = inspect(capsys, tmp_path / "b.bin")
    assert status == 2 or "schemas" not in error


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        ("hcpe", shogi_boards.records("hcpe", shogi_boards.positions(40))),
        ("psv", shogi_boards.records("psv", shogi_boards.positions(40))),
        ("ceres_tpg", ceres_records(3)),
    ],
)
def test_boards_of_shogi_and_records_of_ceres_are_recognized(
    schema: str, data: bytes, tmp_path: Path, capsys: Capture
):
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.zst").write_bytes(zstd(data))
    for name in ("a.bin", "a.zst"):
        assert (
            inspected(capsys, tmp_path / name)["schema"] == f"loaderd.schemas.{schema}(), recognized by the content"
        )


def test_what_cannot_be_read_says_how_to_convert_it(tmp_path: Path, capsys: Capture):
    (tmp_path / "a.binpack").write_bytes(b"BINP" + (8).to_bytes(4, "little") + bytes(8))
    assert "convert FROM TO): loaderd.schemas.nnue_bin() reads" in inspect(capsys, tmp_path / "a.binpack")[2]
    (tmp_path / "a.vf").write_bytes(VIRIFORMAT)
    assert "viriformat.unroll(FROM, TO). loaderd.schemas.marlin() reads" in inspect(capsys, tmp_path / "a.vf")[2]
    np.arange(1, 80, dtype="<u4").tofile(tmp_path / "a.bin")
    for options in (["--features"], []):
        assert "loaderd.FixedRecords(dtype)" in "".join(inspect(capsys, tmp_path / "a.bin", *options)[1:])


def test_rows_of_katago_tell_the_size_of_the_board(tmp_path: Path, capsys: Capture):
    for rows, options in (
        (kata.rows(9, 80), ""),
        (kata.rows(9, 64, q_values=True), ", q_values=True"),
        (kata.rows(9, 96, metadata=True), ", num_targets=96, metadata=True"),
    ):
        np.savez_compressed(tmp_path / "a.npz", **{name: np.zeros(5, rows)[name] for name in rows.names or ()})
        told = inspected(capsys, tmp_path / "a.npz", "--record", 4)
        assert told["schema"] == f"loaderd.schemas.katago(board_size=9{options}), recognized by the content"
    assert np.shape(told["fields"]["planes"]) == (22, 9, 9) and told["blocks"] == [5]


def test_the_schema_proposed_for_any_npz_reads_it(tmp_path: Path, capsys: Capture):
    arrays = {"a b": np.arange(60).reshape(20, 3), '"': np.arange(20, dtype=">i2"), "😀": np.array([b"ab"] * 20)}
    shard = tmp_path / 'back\\users"""\udcff.npz'  # a name that is no valid Unicode, nor a text of Python's as it is
    np.savez(shard, **arrays)
    status, text, _ = inspect(capsys, shard)
    assert status == 0 and "20 healthy records" in text and "none is known" in text
    module: dict[str, Any] = {}
    exec(inspect(capsys, shard, "--features")[1].encode(), module)
    options: dict[str, Any] = {"batch_size": 20, "shuffle": False, "workers": 1, "index_cache": "none"}
    with loaderd.Loader(shard, module["schema"], **options) as loader:
        for batch in loader:
            for name, values in arrays.items():
                np.testing.assert_array_equal(batch[name], values)


def test_it_is_said_what_values_may_be_and_what_is_left_out(tmp_path: Path, capsys: Capture):
    row = np.dtype([("bits", "u1", (32,)), ("moves", "<i2", (9,)), ("chances", "<f2", (9,))])
    np.save(tmp_path / "a.npy", np.zeros(5, row))
    text = inspect(capsys, tmp_path / "a.npy", "--features")[1]
    assert '# Bits? Then bits=["bits"] in FixedRecords, and loaderd.Bits("bits", (256,)).' in text
    assert '# Bits of which few are set? Then loaderd.Sparse("bits", k=…).' in text
    assert '# The places of "chances"? Then loaderd.Scatter("moves", "chances", shape=…).' in text
    for name, lists in (("a", [[1], [2, 3]]), ("b", [[4, 5, 6], [7]])):
        columns = {
            "lists": lists,
            "bits": pa.array([bytes(4)] * 2, pa.binary(4)),
            "holes": pa.array([None, 1], pa.timestamp("us")),
            "gaps": [None, 1],
        }
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    text = inspect(capsys, tmp_path / "?.parquet", "--features")[1]
    assert 'loaderd.Raw("int64", (3,), pad=-1),' in text and "of another kind" not in text
    assert (
        "# Bits? Then loaderd.PackedBits(32) in FixedRecords" in text
        and "# 'holes' is left out: it has nulls." in text
    )
    assert '    # It has nulls, which become the default.\n    "gaps": loaderd.Raw("int64", default=0),' in text
    assert "holes is left out: it has nulls" in inspect(capsys, tmp_path / "a.parquet")[1]
    assert inspected(capsys, tmp_path / "a.parquet")["left_out"] == {"holes": "it has nulls"}
    name = "a: int64>\nraise SystemExit('it ran')\n#"
    parquet.write_table(pa.table({"x": [1.0], "evil": [{name: 1}]}), tmp_path / "evil.data")
    exec(inspect(capsys, tmp_path / "evil.data", "--features")[1], {})
    parquet.write_table(pa.table({"lists": [1, 2]}), tmp_path / "c.parquet")
    assert "# 'c.parquet' is of another kind" in inspect(capsys, tmp_path / "?.parquet", "--features")[1]


def test_values_that_json_has_no_word_for(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    arrays = {
        "complex": np.array([[1 + 2j, complex(np.nan, 0)]] * 2, np.complex64),
        "long": np.array([0.5, -np.inf], np.longdouble),
        "time": np.array([["1970-01-02", "NaT"]] * 2, "datetime64[ns]"),
        "span": np.array([5, 6], "timedelta64[s]"),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "proposed.py").write_text(inspect(capsys, tmp_path / "a.npz", "--features")[1])
    monkeypatch.syspath_prepend(tmp_path)
    told = inspected(capsys, tmp_path / "a.npz", "--schema", "proposed:schema", "--record", 0)
    time = ["1970-01-02T00:00:00.000000000", "NaT"]
    complexes = ["(1+2j)", "(nan+0j)"]
    assert told["values"] == {"complex": complexes, "long": [0.5], "time": time, "span": ["5 seconds"]}
    assert told["fields"] == {"complex": complexes, "long": 0.5, "time": time, "span": "5 seconds"}
    told = inspected(capsys, tmp_path / "a.npz", "--schema", "proposed:schema", "--record", 1)
    assert told["values"]["long"] == [None] and told["fields"]["long"] is None
    shards = testing.write_shards(tmp_path / "shards", {"x": np.array([[np.nan, np.inf, 1.5]], np.float32)})
    assert inspected(capsys, shards[0], "--record", 0)["values"] == {"x": [None, None, 1.5]}


def test_text_that_is_no_utf8_and_bytes(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    """Beside them a number of ml_dtypes, which is of the same kind for numpy as bytes."""
    record = np.array([("Müller".encode("latin-1"), [b"\1", b"\2"])], [("text", "S8"), ("bytes", "V2", (2,))])
    record.tofile(tmp_path / "a.bin")
    pairs = np.array([[(1, 0.0), (2, 0.0)]], [("a", "<i4"), ("b", "<f4")])
    half = np.array([b"\x80\x3f"], "V2")
    (shard,) = testing.write_shards(tmp_path / "shards", {"pairs": pairs, "half": half})
    (tmp_path / "odd.py").write_text(f"""
import loaderd
import numpy as np
fixed = loaderd.Schema(
    loaderd.FixedRecords(np.dtype({record.dtype.descr})),
    {{"text": loaderd.Array("text"), "bytes": loaderd.Array("bytes")}},
)
raw = loaderd.Schema(
    {{"pairs": loaderd.Raw(np.dtype({pairs.dtype.descr}), (2,)), "half": loaderd.Raw("bfloat16")}},
    {{"pairs": loaderd.Array("pairs"), "half": loaderd.Array("half")}},
)
""")
    monkeypatch.syspath_prepend(tmp_path)
    told = inspected(capsys, tmp_path / "a.bin", "--schema", "odd:fixed")
    assert told["fields"] == {"text": "M\\xfcller", "bytes": ["0100", "0200"]}
    told = inspected(capsys, shard, "--schema", "odd:raw")
    assert told["fields"] == {"pairs": ["0100000000000000", "0200000000000000"], "half": 1.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.gz", "--schema", "katgo"], "Did you mean katago?"),
        (["a.gz", "--record", "90"], "got 90\nThe last healthy one is 2;"),
        (["a.gz", "--features", "--schema", "lc0"], "--features proposes a schema"),
        (["cut.npz"], "expected a whole npz"),
        (["unequal.npz"], "rows: {'a': 3, 'b': 4}"),
        (["value.npz"], "expected arrays with one row a record, found no rows, but a single value in each of ['a']"),
        (["old.gz", "--record", "0"], "expected version 6, of 8,356 bytes, found version 5"),
    ],
)
def test_what_cannot_be_shown_is_said(
    arguments: list[str], said: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("a.gz").write_bytes(leela_game(3))
    old = np.zeros(2, leela.RECORD_V6)
    old["version"] = 6, 5
    Path("old.gz").write_bytes(gzip.compress(old[::-1].tobytes()))
    np.savez("unequal.npz", a=np.zeros(3), b=np.zeros(4))
    np.savez("own.npz", a=np.zeros(3))
    np.savez("value.npz", a=np.float32(1))
    Path("cut.npz").write_bytes(Path("own.npz").read_bytes()[:-30])
    if arguments[0] == "old.gz":
        arguments = [*arguments, "--schema", "lc0"]
    status, _, error = inspect(capsys, *arguments)
    assert status == 2 and said in error
