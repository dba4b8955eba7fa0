"""Files as KataGo's training data writer makes them, against a plain decoding of what its training does with them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loaderd
from loaderd.errors import SchemaError, ShardReadError
from loaderd.schemas import kata
from tests.helpers.device_program import unpacked

Arrays = dict[str, npt.NDArray[Any]]


def rows(count: int, seed: int, num_targets: int = 80, size: int = 19, **have: bool) -> Arrays:
    """Arrays of ``count`` rows; shapes and dtypes are those of KataGo's trainingwrite.cpp."""
    rng = np.random.default_rng(seed)
    points = size * size
    planes = rng.random((count, 22, points)) < 0.3
    arrays = {
        "binaryInputNCHWPacked": np.packbits(planes, axis=2),
        "globalInputNC": rng.random((count, 19), np.float32),
        "policyTargetsNCMove": rng.integers(0, 2000, (count, 2, points + 1), np.int16),
        "globalTargetsNC": rng.random((count, num_targets), np.float32),
        "scoreDistrN": rng.integers(-100, 101, (count, 2 * points + 120)).astype(np.int8),
        "valueTargetsNCHW": rng.integers(-100, 101, (count, 5, size, size)).astype(np.int8),
        "qValueTargetsNCMove": rng.integers(-32000, 32001, (count, 3, points + 1), np.int16),
        "metadataInputNC": rng.random((count, 192), np.float32),
    }
    return {name: values for name, values in arrays.items() if have.get(name, True)}


def plainly(arrays: Arrays, size: int = 19) -> Arrays:
    """Row by row, bit by bit, as the comments of trainingwrite.h have it; what is not there is 0."""
    count = len(arrays["globalInputNC"])
    found: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for row in range(count):
        planes = np.zeros((22, size, size), np.float32)
        for plane in range(22):
            packed = arrays["binaryInputNCHWPacked"][row, plane].tolist()
            for point in range(size * size):
                planes[plane, point // size, point % size] = packed[point // 8] >> (7 - point % 8) & 1
        targets = arrays["globalTargetsNC"][row].tolist()
        found["planes"].append(planes)
        found["global"].append(arrays["globalInputNC"][row])
        for name, which in (("policy", 0), ("next_policy", 1)):
            found[name].append([float(visits) for visits in arrays["policyTargetsNCMove"][row, which]])
        found["targets"].append(targets + [0.0] * (80 - len(targets)))
        found["weight"].append(targets[25])
        found["scores"].append(arrays["scoreDistrN"][row])
        found["value_targets"].append(arrays["valueTargetsNCHW"][row])
        q_values, metadata = (arrays.get(name) for name in (kata.Q_VALUES, kata.METADATA))
        found["q_values"].append(np.zeros((3, size * size + 1)) if q_values is None else q_values[row])
        found["metadata"].append(np.zeros(192) if metadata is None else metadata[row])
    return {name: np.array(values, np.float32) for name, values in found.items()}


FIELDS = [
    *("planes", "global", "policy", "next_policy", "targets", "weight", "scores", "value_targets"),
    *("q_values", "metadata"),
]
ALL: dict[str, Any] = {"q_values": True, "metadata": True, "absent": "zeros"}


def check(path: Path, schema: loaderd.Schema, arrays: list[Arrays], size: int = 19) -> None:
    """That the files hold these arrays, one behind the other."""
    expected = [plainly(each, size) for each in arrays]
    done = 0
    with loaderd.Loader(path, schema, batch_size=32, shuffle=False, index_cache="none") as loader:
        for batch in loader:
            assert list(batch) == FIELDS[: len(batch)]
            count = len(batch["weight"])
            for name, values in batch.items():
                whole = np.concatenate([each[name] for each in expected])[done : done + count]
                assert values.dtype == np.float32 and values.shape == whole.shape
                assert values.tobytes() == whole.tobytes(), name
            done += count
    assert done == sum(len(each["weight"]) for each in expected)


@pytest.mark.parametrize("write", [np.savez_compressed, np.savez])
def test_files_of_rows(write: Any, tmp_path: Path):
    arrays = [rows(70, 1, 64), rows(41, 2, 64)]
    for number, each in enumerate(arrays):
        write(tmp_path / f"{number}.npz", **each)
    check(tmp_path / "*.npz", loaderd.schemas.katago(), arrays)


def test_versions_of_files_mixed_and_smaller_boards(tmp_path: Path):
    """Packed planes of 9 × 9 points are 11 bytes each."""
    arrays = [
        rows(20, 1, 64, 9, metadataInputNC=False),
        rows(31, 2, 80, 9, qValueTargetsNCMove=False),
        rows(17, 3, 64, 9, qValueTargetsNCMove=False, metadataInputNC=False),
        rows(25, 4, 80, 9),
    ]
    for number, each in enumerate(arrays):
        np.savez_compressed(tmp_path / f"{number}.npz", **each)
    check(tmp_path / "*.npz", loaderd.schemas.katago(9, **ALL), arrays, size=9)
    check(tmp_path / "*.npz", loaderd.schemas.katago(9), arrays, size=9)
    with (
        pytest.raises(ShardReadError, match=r"0\.npz.*expected an array 'metadataInputNC', found only"),
        loaderd.Loader(
            tmp_path / "*.npz", loaderd.schemas.katago(9, metadata=True), batch_size=4, index_cache="none"
        ) as loader,
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("num_targets", "wanted", "said"),
    [
        (80, 64, r"\(rows, 64\) in C order, found float32, \(20, 80\)"),
        (81, 80, r"\(rows, 64 to 80\) in C order, found float32, \(20, 81\)"),
        (63, 80, r"\(rows, 64 to 80\) in C order, found float32, \(20, 63\)"),
    ],
)
def test_files_of_another_version_are_named(num_targets: int, wanted: int, said: str, tmp_path: Path):
    np.savez_compressed(tmp_path / "0.npz", **rows(20, 5, num_targets))
    schema = loaderd.schemas.katago(num_targets=wanted)
    with (
        pytest.raises(ShardReadError, match=f"'globalTargetsNC' of float32, {said}"),
        loaderd.Loader(tmp_path / "0.npz", schema, batch_size=4, index_cache="none") as loader,
    ):
        next(iter(loader))


@pytest.mark.parametrize("name", [*rows(1, 0)])
@pytest.mark.parametrize("how", ["absent", "rows", "bits"])
def test_damage_in_each_array_is_named(name: str, how: str, tmp_path: Path):
    arrays = rows(40, 6, size=5)
    path = tmp_path / "0.npz"
    if how != "bits":
        damaged = {name: arrays[name][:39]} if how == "rows" else {}
        np.savez(path, **{each: values for each, values in arrays.items() if each != name}, **damaged)
    else:
        np.savez(path, **arrays)
        data = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            data[archive.getinfo(f"{name}.npy").header_offset + 300] ^= 4
        path.write_bytes(data)
    said = {"absent": f"an array '{name}'", "rows": f"one row a record, found rows.*'{name}': 39", "bits": "its CRC"}
    schema = loaderd.schemas.katago(5, q_values=True, metadata=True)
    with (
        pytest.raises(ShardReadError, match=said[how]) as caught,
        loaderd.Loader(path, schema, batch_size=4, workers=1, index_cache="none") as loader,
    ):
        next(iter(loader))
    assert name in str(caught.value)


def masked(planes: npt.NDArray[Any], passes: npt.NDArray[Any], kept: int) -> tuple[bytes, bytes]:
    """A row that knows of the last ``kept`` turns: as KataGo's matrices have it, but one plane after the other."""
    planes, passes = planes.copy(), passes.copy()
    for ago in range(5):
        if ago >= kept:
            planes[9 + ago] = passes[ago] = 0
    if kept < 2:
        planes[16] = planes[15] if kept == 1 else planes[14]
    if kept < 1:
        planes[15] = planes[14]
    return planes.tobytes(), passes.tobytes()


@pytest.mark.parametrize(("unpack", "chance"), [("worker", 0.25), ("worker", 0.05), ("device", 0.05)])
def test_history_is_masked_at_random(unpack: Any, chance: float, tmp_path: Path):
    """Where most rows are masked, and where few are, which are made in other ways."""
    arrays = rows(700, 7, size=5)
    np.savez(tmp_path / "0.npz", **arrays)
    stored = plainly(arrays, 5)
    schema = loaderd.schemas.katago(5, mask_history=chance, q_values=True, metadata=True)
    drawn: list[list[int]] = []
    with loaderd.Loader(
        tmp_path / "0.npz", schema, batch_size=700, epochs=2, shuffle=False, index_cache="none", unpack=unpack
    ) as loader:
        for batch in loader if unpack == "worker" else unpacked(loader, loader):
            drawn.append([])
            for row in range(700):
                made = batch["planes"][row].tobytes(), batch["global"][row].tobytes()
                kept = [k for k in range(6) if masked(stored["planes"][row], stored["global"][row], k) == made]
                drawn[-1] += kept
            for name in FIELDS[2:]:
                assert batch[name].tobytes() == stored[name].tobytes(), name
    assert [len(epoch) for epoch in drawn] == [700, 700] and drawn[0] != drawn[1]
    expected = [1400 * chance * (1 - chance) ** kept for kept in range(5)]
    expected.append(1400 - sum(expected))
    counts = np.bincount(drawn[0] + drawn[1], minlength=6)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5, "chi-square of 5 degrees of freedom, at 0.001"


def test_what_cannot_be_is_refused():
    for wrong in (-0.1, 1.1, np.nan, "0.02", None):
        with pytest.raises(SchemaError, match="katago: mask_history must be"):
            loaderd.schemas.katago(mask_history=wrong)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match='absent must be "error" or "zeros"'):
        loaderd.schemas.katago(absent="none")  # type: ignore[arg-type]
