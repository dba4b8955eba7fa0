"""Positions as programs store them: their values, through loaders and servers, and with damage in each field."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import SkippedDataWarning
from loaderd.schema import packed_schema
from tests.helpers import nnue_boards, shogi_boards
from tests.helpers.decoding import decoded, rows_of_records
from tests.helpers.device_program import run, unpacked
from tests.helpers.fixed_files import zstd
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.helpers.serving import Server
from tests.schemas.test_ceres import records as ceres_records

GAMES = [(game, variant) for game in (nnue_boards, shogi_boards) for variant in game.VARIANTS]


@pytest.mark.parametrize(("game", "variant"), GAMES)
def test_boards_of_any_pieces(game: Any, variant: str, kernels: str):
    """Against a plain decoding, by the workers and by a device."""
    schema, positions = game.VARIANTS[variant], game.positions(400)
    rows = rows_of_records(schema, game.records(variant, positions))
    assert BatchDecoder(schema).kernels == kernels
    packed = decoded(packed_schema(schema, for_device=True), rows)
    assert "bullet" not in variant or sum(each.nbytes for each in packed.values()) <= 34 * len(rows)
    for fields in (decoded(schema, rows), {**packed, **run(schema.device_program(), packed)}):
        values = {name: fields[name].tolist() for name in schema.fields}
        for number, position in enumerate(positions):
            assert {name: each[number] for name, each in values.items()} == game.expected(variant, position)


def of_game(game: Any, variant: str) -> Callable[[int], bytes]:
    return lambda count: game.records(variant, game.positions(count))


# By how a user writes the schema: records, and the stored features that hold no value where all their bytes are 0x7f.
SCHEMAS: dict[str, tuple[Callable[[int], bytes], set[str]]] = {
    "bullet()": (of_game(nnue_boards, "bullet"), {"occupied", "pieces", "result"}),
    "bullet(mirrored=True)": (
        of_game(nnue_boards, "bullet"),
        {"occupied", "pieces", "result", "king", "opponent_king"},
    ),
    "marlin()": (of_game(nnue_boards, "marlin"), {"occupied", "pieces", "result"}),
    "nnue_bin()": (of_game(nnue_boards, "nnue_bin"), {"sfen", "result"}),
    "hcpe()": (of_game(shogi_boards, "hcpe"), {"hcp", "gameResult"}),
    "psv()": (of_game(shogi_boards, "psv"), {"sfen", "game_result"}),
    "ceres_tpg()": (ceres_records, {"policy_indices"}),
}


def schema_of(call: str) -> loaderd.Schema:
    made: loaderd.Schema = eval(f"loaderd.schemas.{call}")
    return made


def write(folder: Path, call: str, data: bytes) -> Path:
    path = folder / f"{re.sub(r'[^a-z]', '_', call)}.bin"
    path.write_bytes(zstd(data) if call.startswith("ceres") else data)
    return path


def records_in(batches: Any, schema: loaderd.Schema) -> list[bytes]:
    """All fields of each record."""
    found = []
    for batch in batches:
        arrays = [np.asarray(batch[name]) for name in schema.fields]
        found += [b"".join(each[number].tobytes() for each in arrays) for number in range(len(arrays[0]))]
    return found


@pytest.mark.parametrize("call", SCHEMAS)
def test_a_loader_delivers_each_once_whatever_happens(call: str, tmp_path: Path):
    """Shuffled; a worker is killed, and another loader goes on where it stood. Then packed."""
    schema, data = schema_of(call), SCHEMAS[call][0](400)
    path = write(tmp_path, call, data)
    expected = sorted(records_in([decoded(schema, rows_of_records(schema, data))], schema))
    options: dict[str, Any] = {"batch_size": 64, "workers": 1, "shuffle": loaderd.Shuffle(200, 16)}
    with loaderd.Loader(path, schema, **options) as loader:
        batches = iter(loader)
        found = records_in(islice(batches, 2), schema)
        kill(*workers_of(newest_daemon()))
        found += records_in(islice(batches, 2), schema)
        position = loader.position
    with loaderd.Loader(path, schema, start=position, **options) as loader:
        found += records_in(loader, schema)
    assert sorted(found) == expected
    with loaderd.Loader(path, schema, unpack="device", **options) as loader:
        assert records_in(unpacked(loader, loader), schema) == found


def test_a_server_sends_them(tmp_path: Path):
    module = ["import loaderd"]
    for number, call in enumerate(SCHEMAS):
        path = write(tmp_path, call, SCHEMAS[call][0](150))
        module.append(f"d{number} = loaderd.Dataset({str(path)!r}, loaderd.schemas.{call})")
    (tmp_path / "boards_of_test.py").write_text("\n".join(module))
    server = Server(tmp_path, *(f"boards_of_test:d{number}" for number in range(len(SCHEMAS))), network=True)
    try:
        for number, call in enumerate(SCHEMAS):
            schema, data = schema_of(call), SCHEMAS[call][0](150)
            expected = records_in([decoded(schema, rows_of_records(schema, data))], schema)
            with loaderd.connect(server.address, f"d{number}", batch_size=64, workers=1) as loader:
                assert sorted(records_in(loader, schema)) == sorted(expected), call
    finally:
        server.close()


@pytest.mark.parametrize("unpack", ["worker", "device"])
@pytest.mark.parametrize("call", SCHEMAS)
def test_damage_in_each_field_is_named_or_a_value(call: str, unpack: Any, tmp_path: Path):
    """Of each feature that is read, another record is damaged."""
    schema, (make, without_value) = schema_of(call), SCHEMAS[call]
    size, names = schema.records.record_bytes, list(schema.features)  # type: ignore[union-attr]
    data = bytearray(make(3 * len(names)))
    for number, name in enumerate(names):
        start = 3 * number * size + schema.records.offset_of(name)  # type: ignore[union-attr]
        data[start : start + schema.features[name].num_bytes] = b"\x7f" * schema.features[name].num_bytes
    left_out = {3 * number: name for number, name in enumerate(names) if name in without_value}
    left = b"".join(
        data[number * size : (number + 1) * size] for number in range(3 * len(names)) if number not in left_out
    )
    options: dict[str, Any] = {"batch_size": 16, "workers": 1, "unpack": unpack, "shuffle": False}
    path = write(tmp_path, call, bytes(data))
    with (
        pytest.warns(SkippedDataWarning),
        loaderd.Loader(path, schema, on_corrupt="skip_record", **options) as loader,
    ):
        found = records_in(loader if unpack == "worker" else unpacked(loader, loader), schema)
        assert {damage.record for damage in loader.statistics().damages} == {*left_out}
    with np.errstate(over="ignore"):
        assert found == records_in([decoded(schema, rows_of_records(schema, left))], schema)
