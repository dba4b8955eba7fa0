"""Games that Leela Chess Zero's own program wrote, against a plain decoding of lczero-training's description."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loaderd
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import RecordMismatchError
from loaderd.schemas.leela import RECORD

V6 = struct.Struct("<4sI7432s832sBBBBBBBb15fIHH4H")
Arrays = dict[str, npt.NDArray[Any]]


def plainly(record: bytes) -> dict[str, bytes]:
    """The fields of a record of input format 1, each as float32 bytes, as ``convert_v6_to_tuple`` says."""
    version, input_format, probabilities, planes, us_ooo, us_oo, them_ooo, them_oo, side, rule50, *rest = V6.unpack(
        record
    )
    _, _, _, _, _, _, _, _, plies_left, result_q, result_d, *_ = rest
    assert (version, input_format) == (struct.pack("<i", 6), 1)
    flat = {value: struct.pack("<f", value) * 64 for value in (0, 1)}
    rights = b"".join(flat[value] for value in (us_ooo, us_oo, them_ooo, them_oo, side))
    board = np.unpackbits(np.frombuffer(planes, np.uint8)).astype(np.float32).tobytes()
    win, loss = 0.5 * (1.0 - result_d + result_q), 0.5 * (1.0 - result_d - result_q)
    return {
        "planes": board + rights + struct.pack("<f", rule50 / 99.0) * 64 + flat[0] + flat[1],
        "policy": probabilities,
        "wdl": struct.pack("<fff", win, result_d, loss),
        "plies_left": struct.pack("<f", plies_left),
    }


def records_of(games: list[Path]) -> list[bytes]:
    data = b"".join(gzip.decompress(game.read_bytes()) for game in games)
    assert len(data) % V6.size == 0
    return [data[start : start + V6.size] for start in range(0, len(data), V6.size)]


def check(batches: Iterator[Any], records: list[bytes]) -> None:
    """That the batches hold these records, in this order."""
    done = 0
    for batch in batches:
        for number in range(len(batch["wdl"])):
            expected = plainly(records[done])
            for name, value in expected.items():
                assert batch[name][number].tobytes() == value, (name, done)
            done += 1
    assert done == len(records)


@pytest.fixture
def tar(tmp_path: Path, lc0_games: list[Path], write_tar: Callable[..., Path]) -> Path:
    """As the hourly tars are: a folder, a LICENSE, and the games."""
    members = [("hour/", b""), ("hour/LICENSE", b"ODbL\n" * 99)]
    members += [(f"hour/training.{number}.gz", game.read_bytes()) for number, game in enumerate(lc0_games)]
    return write_tar(tmp_path / "hour.tar", members)


def test_the_record_is_that_of_the_struct():
    assert RECORD.itemsize == V6.size == 8356


def test_a_tar_of_games(tar: Path, lc0_games: list[Path]):
    with loaderd.Loader(tar, loaderd.schemas.lc0(), batch_size=50, shuffle=False, index_cache="none") as loader:
        assert {name: spec.shape for name, spec in loaderd.schemas.lc0().specs.items()} == {
            "planes": (112, 8, 8),
            "policy": (1858,),
            "wdl": (3,),
            "plies_left": (),
        }
        check(iter(loader), records_of(lc0_games))


@pytest.mark.parametrize("kernels", ["compiled", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_and_compiled_code_give_the_same(
    kernels: str, dtype: str, lc0_games: list[Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOADERD_KERNELS", "numpy" if kernels == "numpy" else "")
    schema = loaderd.schemas.lc0(dtype)
    records = records_of(lc0_games)[:70]
    stored = np.frombuffer(b"".join(records), RECORD)
    rows = np.zeros(len(records), schema.row_dtype)
    for name in schema.features:
        rows[name] = stored[name].view("u1").reshape(len(rows), -1) if name == "planes" else stored[name]
    out: Arrays = {name: np.empty((len(rows), *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
    decoder = BatchDecoder(schema)
    assert decoder.kernels == kernels
    decoder.decode(rows.view(np.uint8).reshape(len(rows), -1), out)
    for number, record in enumerate(records):
        expected = np.frombuffer(plainly(record)["planes"], "<f4").astype(dtype)
        assert (out["planes"][number].reshape(-1) == expected).all()


def test_every_count_of_the_50_move_rule_is_divided_as_in_lczero_training(tmp_path: Path, lc0_games: list[Path]):
    records = np.frombuffer(records_of(lc0_games)[0] * 256, RECORD).copy()
    records["rule50_count"] = np.arange(256)
    records.tofile(tmp_path / "plain")
    with loaderd.Loader(
        tmp_path / "plain", loaderd.schemas.lc0(), batch_size=256, shuffle=False, index_cache="none"
    ) as loader:
        check(iter(loader), [record.tobytes() for record in records])


@pytest.mark.parametrize(("field", "value"), [("version", 5), ("input_format", 3)])
def test_other_versions_and_input_formats_are_named(field: str, value: int, tmp_path: Path, lc0_games: list[Path]):
    records = np.frombuffer(b"".join(records_of(lc0_games)[:4]), RECORD).copy()
    records[field] = value
    records.tofile(tmp_path / "plain")
    expected = 6 if field == "version" else 1
    with (
        pytest.raises(RecordMismatchError, match=rf"record 0 .*expected {field} {expected}, found {field} {value}"),
        loaderd.Loader(tmp_path / "plain", loaderd.schemas.lc0(), batch_size=2, index_cache="none") as loader,
    ):
        next(iter(loader))


def test_records_of_another_size_are_told_by_their_version(tmp_path: Path, lc0_games: list[Path]):
    record = records_of(lc0_games)[0]
    longer = struct.pack("<I", 7) + record[4:] + bytes(40)
    (tmp_path / "v7.gz").write_bytes(gzip.compress(longer * 3))
    said = r"of 8,396 bytes with version 7.* and not .* of 8,356 bytes with version 6"
    with pytest.raises(loaderd.errors.ShardFormatError, match=said):
        loaderd.Loader(tmp_path / "v7.gz", loaderd.schemas.lc0(), batch_size=2, index_cache="none")
