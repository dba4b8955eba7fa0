"""Files as KataGo's training data writer makes them, against a plain decoding of what its training does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loaderd
from loaderd.errors import ShardReadError

Arrays = dict[str, npt.NDArray[Any]]


def rows(count: int, seed: int, num_targets: int = 64, size: int = 19) -> Arrays:
    """Arrays of ``count`` rows; shapes and dtypes are those of KataGo's trainingwrite.cpp."""
    rng = np.random.default_rng(seed)
    points = size * size
    planes = rng.random((count, 22, points)) < 0.3
    return {
        "binaryInputNCHWPacked": np.packbits(planes, axis=2),
        "globalInputNC": rng.random((count, 19), np.float32),
        "policyTargetsNCMove": rng.integers(0, 2000, (count, 2, points + 1), np.int16),
        "globalTargetsNC": rng.random((count, num_targets), np.float32),
        "scoreDistrN": rng.integers(-100, 101, (count, 2 * points + 120)).astype(np.int8),
        "valueTargetsNCHW": rng.integers(-100, 101, (count, 5, size, size)).astype(np.int8),
        "qValueTargetsNCMove": rng.integers(-999, 999, (count, 3, points + 1), np.int16),
    }


def plainly(arrays: Arrays, size: int = 19) -> Arrays:
    """As ``read_npz_training_data`` does it."""
    bits = np.unpackbits(arrays["binaryInputNCHWPacked"], axis=2)[:, :, : size * size]
    policy = arrays["policyTargetsNCMove"].astype(np.float32)
    return {
        "planes": bits.reshape(len(bits), 22, size, size).astype(np.float32),
        "global": arrays["globalInputNC"],
        "policy": policy[:, 0],
        "next_policy": policy[:, 1],
        "targets": arrays["globalTargetsNC"],
        "weight": arrays["globalTargetsNC"][:, 25],
        "scores": arrays["scoreDistrN"].astype(np.float32),
        "value_targets": arrays["valueTargetsNCHW"].astype(np.float32),
    }


def check(path: Path, schema: loaderd.Schema, arrays: list[Arrays], size: int = 19) -> None:
    """That the files hold these arrays, one behind the other."""
    expected = [plainly(each, size) for each in arrays]
    done = 0
    with loaderd.Loader(path, schema, batch_size=32, shuffle=False, index_cache="none") as loader:
        for batch in loader:
            assert list(batch) == list(expected[0])
            count = len(batch["weight"])
            for name, values in batch.items():
                whole = np.concatenate([each[name] for each in expected])[done : done + count]
                assert values.dtype == np.float32 and values.shape == whole.shape
                assert values.tobytes() == whole.tobytes(), name
            done += count
    assert done == sum(len(each["weight"]) for each in expected)


@pytest.mark.parametrize("write", [np.savez_compressed, np.savez])
def test_files_of_rows(write: Any, tmp_path: Path):
    arrays = [rows(70, 1), rows(41, 2)]
    for number, each in enumerate(arrays):
        write(tmp_path / f"{number}.npz", **each)
    check(tmp_path / "*.npz", loaderd.schemas.katago(), arrays)


def test_smaller_boards_and_more_targets(tmp_path: Path):
    arrays = rows(20, 4, num_targets=80, size=9)
    np.savez_compressed(tmp_path / "0.npz", **arrays)
    check(tmp_path / "0.npz", loaderd.schemas.katago(board_size=9, num_targets=80), [arrays], size=9)


def test_files_of_another_version_are_named(tmp_path: Path):
    np.savez_compressed(tmp_path / "0.npz", **rows(20, 5, num_targets=80))
    with (
        pytest.raises(ShardReadError, match=r"'globalTargetsNC' of float32, \(rows, 64\).*found float32, \(20, 80\)"),
        loaderd.Loader(tmp_path / "0.npz", loaderd.schemas.katago(), batch_size=4, index_cache="none") as loader,
    ):
        next(iter(loader))
