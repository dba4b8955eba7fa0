"""Sparse inputs of real files of boards: by a loader, of a server, packed; and a board that is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SkippedDataWarning, WorkerError
from loaderd.schema import packed_schema
from tests.helpers import boards
from tests.helpers.device_program import unpacked
from tests.remote.network_server import NetworkServer

MODULE = """
import loaderd
from tests.helpers import boards

train = loaderd.Dataset("*.bin", boards.schema())
"""
RECORDS = boards.boards(700)
PACKED = packed_schema(boards.schema(), for_device=True).specs


@pytest.mark.parametrize("unpack", ["worker", "device"])
def test_a_loader_makes_them(tmp_path: Path, unpack: Any, kernels: str):
    path = boards.write(tmp_path / "a.bin", RECORDS)
    with loaderd.Loader(path, boards.schema(), batch_size=64, workers=1, unpack=unpack) as loader:
        boards.check(unpacked(loader, loader) if unpack == "device" else loader, RECORDS)
    assert unpack == "worker" or sum(each.record_bytes for each in PACKED.values()) == 101


@pytest.mark.parametrize("unpack", ["worker", "device"])
def test_a_board_that_is_damaged_is_named(tmp_path: Path, unpack: Any):
    """Also where a device makes the indices, which cannot say so."""
    records = RECORDS.copy()
    boards.damaged(records, 345)
    path = boards.write(tmp_path / "a.bin", records)
    options: dict[str, Any] = {"batch_size": 50, "workers": 1, "unpack": unpack}
    with loaderd.Loader(path, boards.schema(), **options) as loader:
        with pytest.raises(WorkerError, match="pieces, as there are codes, found 33") as caught:
            list(loader)
        assert caught.value.damage is not None and caught.value.damage.record == 345
        assert caught.value.damage.shard.endswith("a.bin")
    with (
        loaderd.Loader(path, boards.schema(), on_corrupt="skip_record", **options) as loader,
        pytest.warns(SkippedDataWarning, match=r"a\.bin: record 345"),
    ):
        numbers = np.concatenate([batch["number"] for batch in loader])
    assert sorted(numbers.tolist()) == [number for number in range(700) if number != 345]


def test_a_server_sends_what_they_are_made_of(tmp_path: Path):
    boards.write(tmp_path / "a.bin", RECORDS)
    server = NetworkServer(tmp_path, module=MODULE, PYTHONPATH=str(Path(__file__).parents[2]))
    try:
        options: dict[str, Any] = {"batch_size": 64, "workers": 1}
        with loaderd.connect(server.address, "train", **options) as loader:
            boards.check(loader, RECORDS)
        with loaderd.connect(server.address, "train", unpack="device", **options) as loader:
            boards.check(unpacked(loader, loader), RECORDS)
    finally:
        server.close()
