"""Boards of games through loaders and a server: of each schema that packs its pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import loaderd
from tests.helpers import nnue_boards, shogi_boards
from tests.helpers.device_program import unpacked
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.remote.network_server import NetworkServer

NNUE, SHOGI = (nnue_boards, nnue_boards.positions(700)), (shogi_boards, shogi_boards.positions(400))


@pytest.mark.parametrize(
    ("game", "variant"),
    [
        *((NNUE, variant) for variant in ("bullet, mirrored", "marlin, buckets", "nnue_bin")),
        *((SHOGI, variant) for variant in ("hcpe planes", "psv halfkp")),
    ],
)
def test_a_loader_delivers_each_once_whatever_happens(game: Any, variant: str, tmp_path: Path):
    """Shuffled; a worker is killed, and another loader goes on where it stood. Then packed."""
    boards, positions = game
    path = boards.write(tmp_path / "a.bin", variant, positions)
    options: dict[str, Any] = {"batch_size": 64, "workers": 1, "shuffle": loaderd.Shuffle(200, 16)}
    schema = boards.VARIANTS[variant]
    with loaderd.Loader(path, schema, **options) as loader:
        copies = ({name: values.copy() for name, values in batch.items()} for batch in loader)
        batches = [next(copies) for _ in range(2)]
        for worker in workers_of(newest_daemon()):
            kill(worker)
        batches += [next(copies) for _ in range(2)]
        position = loader.position
    with loaderd.Loader(path, schema, start=position, **options) as loader:
        boards.check([*batches, *loader], variant, positions)
    with loaderd.Loader(path, schema, unpack="device", **options) as loader:
        boards.check(unpacked(loader, loader), variant, positions)


@pytest.mark.parametrize(
    ("game", "variant", "schema"), [(NNUE, "nnue_bin", "nnue_bin()"), (SHOGI, "psv halfkp", "psv()")]
)
def test_a_server_sends_them(game: Any, variant: str, schema: str, tmp_path: Path):
    boards, positions = game
    boards.write(tmp_path / "a.bin", variant, positions)
    module = f"import loaderd\n\ntrain = loaderd.Dataset('*.bin', loaderd.schemas.{schema})\n"
    server = NetworkServer(tmp_path, module=module)
    try:
        with loaderd.connect(server.address, "train", batch_size=64, workers=1) as loader:
            boards.check(loader, variant, positions)
    finally:
        server.close()
