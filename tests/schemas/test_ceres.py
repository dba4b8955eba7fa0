"""Files as Ceres writes them, against a plain decoding of what CeresTrain's data set does with them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from loaderd.schemas.ceres import RECORD
from tests.helpers.device_program import unpacked
from tests.helpers.fixed_files import zstd


def records(count: int) -> bytes:
    """Of each, the index in the parent is its number; moves have indices of their own, as far as there are any."""
    rng, stored = np.random.default_rng(count), bytearray()
    for number in range(count):
        moves = rng.permutation(1858)[: rng.integers(1, 93)].tolist()
        values = rng.random(len(moves)).astype("<f2").tolist()
        moves, values = moves + moves[-1:] * (92 - len(moves)), values + values[-1:] * (92 - len(values))
        chances = rng.dirichlet(np.ones(3), 3).reshape(-1)
        stored += struct.pack("<10f56x3f2eh", *chances, *rng.standard_normal(4), *rng.random(2), number)
        stored += struct.pack("<92h", *moves)
        stored += np.array(values, "<f2").tobytes() + rng.integers(-128, 128, 64 * 137).astype("i1").tobytes()
    return bytes(stored)


def plainly(record: bytes) -> dict[str, Any]:
    """The fields of a record, each as bytes."""
    policies = np.zeros(1858, np.float16)
    indices, values = struct.unpack_from("<92h", record, 114), struct.unpack_from("<92e", record, 298)
    for index, value in zip(indices, values, strict=True):
        policies[index] = value
    squares = np.array([number / 100 for number in struct.unpack_from("<8768b", record, 482)], np.float32)
    (mlh,) = np.frombuffer(record[100:104], "<f4")
    return {
        "squares": squares.tobytes(),
        "policies": policies.tobytes(),
        "wdl_nondeblundered": record[:12],
        "wdl_deblundered": record[12:24],
        "wdl_q": record[24:36],
        "q_deviation_lower": struct.pack("<f", *struct.unpack_from("<e", record, 108)),
        "q_deviation_upper": struct.pack("<f", *struct.unpack_from("<e", record, 110)),
        "played_q_suboptimality": record[36:40],
        "mlh": (np.square(mlh / np.float32(0.1)) / np.float32(100)).tobytes(),
        "unc": struct.pack("<f", abs(*struct.unpack_from("<f", record, 104))),
        "uncertainty_policy": struct.pack("<f", abs(*struct.unpack_from("<f", record, 96))),
        "policy_index_in_parent": record[112:114],
    }


def check(batches: Any, stored: bytes) -> None:
    numbers = []
    for batch in batches:
        for place, number in enumerate(np.asarray(batch["policy_index_in_parent"])[:, 0].tolist()):
            found = {name: np.asarray(batch[name])[place].tobytes() for name in loaderd.schemas.ceres_tpg().fields}
            assert found == plainly(stored[number * 9250 : (number + 1) * 9250])
            numbers.append(number)
    assert sorted(numbers) == [*range(len(stored) // 9250)]


@pytest.mark.parametrize("unpack", ["worker", "device"])
def test_files_of_zstd(unpack: Any, tmp_path: Path):
    assert RECORD.itemsize == 9250
    stored = records(150)
    (tmp_path / "a.zst").write_bytes(zstd(stored[: 100 * 9250]))
    (tmp_path / "b.zst").write_bytes(zstd(stored[100 * 9250 :]))
    schema = loaderd.schemas.ceres_tpg()
    with loaderd.Loader(tmp_path / "*.zst", schema, batch_size=32, unpack=unpack, workers=1) as loader:
        check(loader if unpack == "worker" else unpacked(loader, loader), stored)


def test_integers_hold_no_hundredths():
    with pytest.raises(SchemaError, match="ceres_tpg: dtype must hold fractions, got int8"):
        loaderd.schemas.ceres_tpg("int8")


@pytest.mark.parametrize("index", [1858, -1])
@pytest.mark.parametrize("unpack", ["worker", "device"])
def test_an_index_that_is_no_move_is_named(index: int, unpack: Any, tmp_path: Path):
    stored = bytearray(records(5))
    stored[3 * 9250 + 114 : 3 * 9250 + 116] = struct.pack("<h", index)
    (tmp_path / "a.zst").write_bytes(zstd(bytes(stored)))
    with (
        loaderd.Loader(
            tmp_path / "a.zst", loaderd.schemas.ceres_tpg(), batch_size=5, unpack=unpack, workers=1
        ) as loader,
        pytest.raises(WorkerError, match=f"found {index % 65_536}") as caught,
    ):
        next(iter(loader))
    assert caught.value.damage is not None and caught.value.damage.record == 3
