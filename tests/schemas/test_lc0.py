"""Records of Leela Chess Zero, real and random, against a plain decoding of lczero-training's description."""

from __future__ import annotations

import gzip
import io
import itertools
import pickle
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loaderd
from loaderd.cli.main import main
from loaderd.errors import RecordMismatchError, SchemaError, SkippedDataWarning
from loaderd.schemas.leela import INPUT_FORMATS, RECORD, RECORD_V6
from tests.helpers.decoding import decoded, rows_of_records
from tests.helpers.device_program import unpacked
from tests.helpers.fixed_files import tar_of
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.remote.network_server import NetworkServer

HEAD = "<II7432s832s8B15fIHHff"
DTYPES = {6: RECORD_V6, 7: RECORD}
STRUCTS = {6: struct.Struct(HEAD), 7: struct.Struct(HEAD + "fHH8f")}
OFFSETS = {name: RECORD.fields[name][1] for name in RECORD.names or ()}  # type: ignore[index]
NAN = float("nan")
Arrays = dict[str, npt.NDArray[Any]]


def plainly(record: bytes, input_format: int = 1) -> dict[str, bytes]:
    """Each field that any ``targets`` have, as bytes, as lczero-training's source says."""
    version = int.from_bytes(record[:4], "little")
    _, stored_format, policy, planes, *rest = STRUCTS[version].unpack(record)
    us_ooo, us_oo, them_ooo, them_oo, side, rule50, invariance, _ = rest[:8]
    root_q, best_q, root_d, best_d, root_m, best_m, plies_left, result_q, result_d = rest[8:17]
    played_q, played_d, played_m, orig_q, orig_d, orig_m, _, _, _, _, q_st = rest[17:28]
    d_st = rest[28] if version == 7 else NAN
    assert stored_format == input_format
    flat = {value: struct.pack("<f", value) * 64 for value in (0, 1)}
    if input_format == 1:
        middle = b"".join(flat[value] for value in (us_ooo, us_oo, them_ooo, them_oo, side))
    else:
        middle = (
            rank_of(us_ooo) + bytes(6 * 32) + rank_of(them_ooo) + rank_of(us_oo) + bytes(6 * 32) + rank_of(them_oo)
        )
        middle += 2 * flat[0] + (flat[side] if input_format == 2 else bytes(7 * 32) + rank_of(side))
    divisor = 100.0 if input_format > 3 else 99.0
    black = flat[1] if input_format in (132, 133) and invariance >= 128 else flat[0]
    board = np.unpackbits(np.frombuffer(planes, np.uint8)).astype(np.float32).tobytes()
    three = {
        "result": (result_q, result_d, plies_left),
        "best": (best_q, best_d, best_m),
        "played": (played_q, played_d, played_m),
        "orig": (orig_q, orig_d, orig_m),
        "root": (root_q, root_d, root_m),
        "st": (q_st, d_st, NAN),
    }
    fields = {
        "planes": board + middle + struct.pack("<f", rule50 / divisor) * 64 + black + flat[1],
        "policy": policy,
        "values": b"".join(struct.pack("<fff", *values) for values in three.values()),
        "version": struct.pack("<i", version),
    }
    for name, (q, d, moves_left) in three.items():
        fields[f"wdl of {name}"] = struct.pack("<fff", 0.5 * (1.0 - d + q), d, 0.5 * (1.0 - d - q))
        fields[f"plies_left of {name}"] = struct.pack("<f", moves_left)
    return fields


def rank_of(files: int) -> bytes:
    """Eight floats: 1 where a bit is set, the lowest one first."""
    return struct.pack("<8f", *(files >> file & 1 for file in range(8)))


def named(fields: dict[str, bytes], name: str, targets: str) -> Any:
    """What a schema of ``targets`` gives for its field ``name``: values, of which one NaN is like another."""
    return np.frombuffer(fields.get(name, fields.get(f"{name} of {targets}", b"")), "<f4")


def records_of(games: list[Path]) -> list[bytes]:
    data = b"".join(gzip.decompress(game.read_bytes()) for game in games)
    size = STRUCTS[6].size
    assert len(data) % size == 0
    return [data[start : start + size] for start in range(0, len(data), size)]


def random_records(count: int, version: int, input_format: int) -> list[bytes]:
    """Any values; ``plies_left`` is the record's number, and its castling rights are such as the format has."""
    rng = np.random.default_rng(1000 * version + input_format)
    records = np.frombuffer(rng.bytes(count * RECORD.itemsize), RECORD).copy()
    for name in RECORD.names or ():
        if RECORD[name].base == "<f4":
            records[name] = rng.normal(size=records[name].shape)
    records["version"], records["input_format"], records["plies_left"] = version, input_format, np.arange(count)
    records["orig_q"][rng.random(count) < 0.3] = np.nan
    if input_format < 3:
        records["side_to_move"] &= 1
    if input_format == 1:
        records["castling"] &= 1
    return [record.tobytes()[: STRUCTS[version].size] for record in records]


def check(batches: Iterator[Any], records: list[bytes]) -> None:
    """That the batches hold these records, in this order."""
    done = 0
    for batch in batches:
        for number in range(len(batch["wdl"])):
            expected = plainly(records[done])
            assert set(batch) == {"planes", "policy", "wdl", "plies_left", "version"}
            for name in batch:
                assert batch[name][number].tobytes() == expected.get(name, expected.get(f"{name} of result")), name
            done += 1
    assert done == len(records)


@pytest.fixture
def tar(tmp_path: Path, lc0_games: list[Path], write_tar: Callable[..., Path]) -> Path:
    """As the hourly tars are: a folder, a LICENSE, and the games."""
    members = [("hour/", b""), ("hour/LICENSE", b"ODbL\n" * 99)]
    members += [(f"hour/training.{number}.gz", game.read_bytes()) for number, game in enumerate(lc0_games)]
    return write_tar(tmp_path / "hour.tar", members)


def test_the_records_are_those_of_the_structs():
    assert (RECORD_V6.itemsize, RECORD.itemsize) == (STRUCTS[6].size, STRUCTS[7].size) == (8356, 8396)
    assert [OFFSETS[name] for name in ("planes", "castling", "root_q", "visits", "q_st", "d_st", "reserved")] == [
        *(7440, 8272, 8280, 8340, 8352, 8356, 8364)
    ]


@pytest.mark.parametrize("input_format", INPUT_FORMATS)
def test_every_input_format_and_every_target_as_the_source_has_them(input_format: int, kernels: str):
    """``kernels``: compiled loops and numpy."""
    records = [*random_records(150, 6, input_format), *random_records(150, 7, input_format)]
    plain = [plainly(record, input_format) for record in records]
    for targets in ("result", "best", "played", "orig", "root", "st", "all"):
        schema = loaderd.schemas.lc0(targets=targets, input_format=input_format)  # type: ignore[arg-type]
        names = {"planes", "policy", "version"} | ({"values"} if targets == "all" else {"wdl", "plies_left"})
        assert set(schema.fields) == names - ({"plies_left"} if targets == "st" else set())
        assert targets != "all" or schema.specs["values"].shape == (6, 3)
        for name, values in decoded(schema, rows_of_records(schema, *records)).items():
            expected = np.stack([named(fields, name, targets) for fields in plain])
            np.testing.assert_array_equal(values.view("<f4").reshape(len(records), -1), expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_format": 6}, r"input_format must be one of 1 \(INPUT_CLASSICAL_112_PLANE\), .*, got 6"),
        ({"input_format": [1]}, r"input_format must be one of .*, got \[1\]"),
        ({"input_format": 1.0}, r"input_format must be one of .*, got 1\.0"),
        ({"targets": "q"}, "targets must be one of result, best, played, orig, root, st, all, got 'q'"),
        ({"input_format": 3, "symmetries": (0, 1)}, "symmetries must be empty for input_format 3"),
        ({"dtype": "int8"}, "lc0: dtype must hold fractions, got int8"),
    ],
)
def test_what_there_is_not(options: Any, said: str):
    with pytest.raises(SchemaError, match=said):
        loaderd.schemas.lc0(**options)


def test_a_tar_of_games(tar: Path, lc0_games: list[Path]):
    with loaderd.Loader(tar, loaderd.schemas.lc0(), batch_size=50, shuffle=False, index_cache="none") as loader:
        assert {name: spec.shape for name, spec in loaderd.schemas.lc0().specs.items()} == {
            "planes": (112, 8, 8),
            "policy": (1858,),
            "wdl": (3,),
            "plies_left": (),
            "version": (),
        }
        check(iter(loader), records_of(lc0_games))


@pytest.mark.parametrize("input_format", [1, 4])
def test_every_count_of_the_50_move_rule_is_divided_as_in_lczero_training(input_format: int):
    records = np.frombuffer(b"".join(256 * random_records(1, 7, input_format)), RECORD).copy()
    records["rule50_count"] = np.arange(256)
    schema = loaderd.schemas.lc0(input_format=input_format)
    found = decoded(schema, rows_of_records(schema, records.tobytes()))
    divisor = 99.0 if input_format == 1 else 100.0
    assert (found["planes"][:, 109, 0, 0] == (np.arange(256) / divisor).astype(np.float32)).all()


# ------------------------------------------------------------------------------ two sizes in one data set


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """Files of both versions, wrapped in each way, and their records; ``plies_left`` is a record's number."""
    folder, records = tmp_path_factory.mktemp("mixed"), list[bytes]()

    def take(count: int, version: int) -> bytes:
        part = np.frombuffer(b"".join(random_records(count, version, 1)), DTYPES[version]).copy()
        part["plies_left"] += len(records)
        records.extend(record.tobytes() for record in part)
        return part.tobytes()

    for version in (6, 7):
        (folder / f"plain-{version}").write_bytes(take(21, version))
        (folder / f"game-{version}.gz").write_bytes(gzip.compress(take(30, version), 1))
        (folder / f"large-{version}.gz").write_bytes(gzip.compress(take(800, version), 1))  # with restart points
    members = [("hour/", b""), ("hour/LICENSE", b"ODbL")]
    for number in range(12):
        members.append((f"hour/{number}.gz", gzip.compress(take(5 + number, 6 + number % 2), 1)))
    with tarfile.open(folder / "hour.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.pax_headers = {"comment": "as of lc0's server", "mtime": "1790000000.5"}
            tar.addfile(info, io.BytesIO(data))
    return folder, records


ALL = loaderd.schemas.lc0(targets="all")


def rows_in(batches: Any) -> list[bytes]:
    """All that is delivered of each record, without its planes."""
    names = ("policy", "values", "version")
    return [
        b"".join(np.asarray(batch[name][number]).tobytes() for name in names)
        for batch in batches
        for number in range(len(batch["version"]))
    ]


def plain_rows(records: list[bytes]) -> list[bytes]:
    fields = [plainly(record) for record in records]
    return [b"".join(each[name] for name in ("policy", "values", "version")) for each in fields]


def options_of(folder: Path, **others: Any) -> dict[str, Any]:
    shuffle = loaderd.Shuffle(window_records=300, block_records=16)
    return {"batch_size": 32, "shuffle": shuffle, "workers": 2, "index_cache": str(folder / "cache"), **others}


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_two_versions_in_one_data_set(mixed: tuple[Path, list[bytes]]):
    """Each record once, with its own values; a resume goes on, and a worker that is killed costs nothing."""
    folder, records = mixed
    with loaderd.Loader(sources(folder), ALL, **options_of(folder)) as loader:
        batches = rows_in(loader)
    assert sorted(batches) == sorted(plain_rows(records))
    versions = [int.from_bytes(row[-4:], "little") for row in batches[:300]]
    assert 30 < versions.count(6) < 270, "they are shuffled with each other"
    for done in (1, 40):
        with loaderd.Loader(sources(folder), ALL, **options_of(folder)) as loader:
            assert rows_in(islice(loader, done)) == batches[: 32 * done]
            position = loader.position
        with loaderd.Loader(sources(folder), ALL, **options_of(folder, start=position)) as loader:
            iterator = iter(loader)
            first = rows_in(islice(iterator, 2))
            kill(workers_of(newest_daemon())[0])
            assert [*first, *rows_in(iterator)] == batches[32 * done :]


def test_two_versions_unpacked_by_a_device_and_over_a_server(mixed: tuple[Path, list[bytes]], tmp_path: Path):
    folder, records = mixed
    with loaderd.Loader(sources(folder), ALL, **options_of(folder, unpack="device")) as loader:
        assert sorted(rows_in(unpacked(loader, loader))) == sorted(plain_rows(records))
    schema = 'loaderd.schemas.lc0(targets="all")'
    module = f"import loaderd\n\ntrain = loaderd.Dataset({list(map(str, sources(folder)))}, {schema})\n"
    server = NetworkServer(tmp_path, module=module)
    try:
        with loaderd.connect(server.address, "train", batch_size=32, workers=1) as loader:
            assert sorted(rows_in(loader)) == sorted(plain_rows(records))
    finally:
        server.close()


@pytest.mark.parametrize("how", ["tfrecord", "records", "npz"])
def test_two_versions_converted(mixed: tuple[Path, list[bytes]], tmp_path: Path, how: str):
    folder, records = mixed
    arguments = [*map(str, sources(folder)), "--schema", "lc0", "--to", str(tmp_path / "to"), "--format", how]
    with pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    assert not ended.value.code
    schema = ALL.as_examples() if how == "tfrecord" else ALL.as_records()
    shards = [path for path in (tmp_path / "to").iterdir() if not path.name.startswith(".")]
    with loaderd.Loader(shards, schema, **options_of(tmp_path, shuffle=False)) as loader:
        assert sorted(rows_in(loader)) == sorted(plain_rows(records))


def test_records_that_do_not_belong_there_are_named(tmp_path: Path):
    """One of the other version among those of a game, and all of another version, or of another input format."""
    game = bytearray(b"".join(random_records(9, 6, 1)))
    size = STRUCTS[6].size
    for first in (0, 4):  # the size is that of the others, also where the first one is damaged
        damaged = bytearray(game)
        damaged[first * size] = 7
        for name, data in (("plain", bytes(damaged)), ("a.gz", gzip.compress(damaged))):
            (tmp_path / name).write_bytes(data)
            options = options_of(tmp_path, shuffle=False, index_cache="none")
            said = rf"record {first} .*expected version 6, of 8,356 bytes, found version 7"
            with (
                pytest.raises(RecordMismatchError, match=said),
                loaderd.Loader(tmp_path / name, ALL, **options) as loader,
            ):
                list(loader)
            with (
                pytest.warns(SkippedDataWarning),
                loaderd.Loader(tmp_path / name, ALL, on_corrupt="skip_any", **options) as loader,
            ):
                left = [game[n * size : (n + 1) * size] for n in range(9) if n != first]
                assert rows_in(loader) == plain_rows(list(map(bytes, left)))
    other = b"".join(random_records(4, 6, 3))
    (tmp_path / "plain").write_bytes(other)
    (tmp_path / "a.tar").write_bytes(tar_of([("4.gz", gzip.compress(other))]))
    for name, member in (("plain", ""), ("a.tar", ", in '4.gz', the member at byte 512 of the tar")):
        said = rf"record 0 .*expected input_format 1, found input_format 3{member}\nGive the schema .* names it"
        with (
            pytest.raises(RecordMismatchError, match=said),
            loaderd.Loader(tmp_path / name, ALL, **options_of(tmp_path)) as loader,
        ):
            next(iter(loader))
    short = b"".join(struct.pack("<I", 6) + record[4:8300] for record in random_records(5, 6, 1))
    (tmp_path / "plain").write_bytes(short)
    said = "of 8,300 bytes with version 6, .* not records of 8,356 bytes with version 6 or 8,396 bytes with version 7"
    with pytest.raises(loaderd.errors.ShardFormatError, match=said):
        loaderd.Loader(tmp_path / "plain", ALL, **options_of(tmp_path))


def test_a_cut_costs_the_records_behind_it(tmp_path: Path):
    """Of each version, plain and compressed; of a game in which a bit has flipped, none is used."""
    expected = []
    for version in (6, 7):
        records = random_records(6, version, 1)
        data = b"".join(records)
        stored = gzip.compress(data, 1)
        flipped = bytearray(stored)
        flipped[len(stored) // 2] ^= 4
        cut = stored[: len(stored) * 2 // 3]
        whole = len(zlib.decompressobj(31).decompress(cut)) // len(records[0])
        for number, (content, left) in enumerate(((data[:-5], 5), (cut, whole), (bytes(flipped), 0), (stored, 6))):
            (tmp_path / f"{version}-{number}").write_bytes(content)
            expected += records[:left]
    options = options_of(tmp_path, shuffle=False, on_corrupt="skip_record", index_cache="none")
    with pytest.warns(SkippedDataWarning), loaderd.Loader(tmp_path / "*-*", ALL, **options) as loader:
        assert rows_in(loader) == plain_rows(expected)


@pytest.mark.parametrize(("version", "size", "games"), [(5, 8308, 1), (5, 8308, 3), (8, 8400, 3)])
def test_another_version_in_a_tar_is_no_damage(version: int, size: int, games: int, tmp_path: Path):
    """Games of 2 records beside one of 250. As any records that do not match, one in a hundred may be left out."""
    records = random_records(250, 6, 1)
    other = b"".join(struct.pack("<II", version, 1) + bytes([number] * (size - 8)) for number in (1, 2))
    members = [("0.gz", gzip.compress(b"".join(records), 1))]
    members += [(f"{number}.gz", gzip.compress(other)) for number in range(1, games + 1)]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    options = options_of(tmp_path, shuffle=False)
    said = rf"^{2 * games} records of another version \(members of tars: {games}\) in 1 of 1 .*:\n.*in '1.gz'"
    with pytest.raises(RecordMismatchError, match=said):
        loaderd.Loader(tmp_path / "a.tar", ALL, **options)
    if games > 1:
        said = f"^6 of 256 records do not match the schema, .*: they are in 3 members of tars. .* version {version}"
        with pytest.raises(RecordMismatchError, match=said):
            loaderd.Loader(tmp_path / "a.tar", ALL, on_corrupt="skip_record", **options)
    policy: Any = "skip_any" if games > 1 else "skip_record"
    said = f"{games} damaged members? of tars in 1 of 1 .* left out; {2 * games} records in them are of another"
    with (
        pytest.warns(SkippedDataWarning, match=said),
        loaderd.Loader(tmp_path / "a.tar", ALL, on_corrupt=policy, **options) as loader,
    ):
        assert rows_in(loader) == plain_rows(records)


def test_inspect_counts_each_version(mixed: tuple[Path, list[bytes]], capsys: pytest.CaptureFixture[str]):
    folder, _ = mixed
    for name, said in (
        (
            "hour.tar",
            "lc0(), recognized by the content; 60 records of version 6 (8,356 bytes), 66 records of version 7",
        ),
        ("large-7.gz", "lc0(), recognized by the content; 800 records of version 7 (8,396 bytes)"),
        ("plain-6", "lc0(), recognized by the content; 21 records of version 6 (8,356 bytes)"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(folder / name), "--record", "2"])
        out = capsys.readouterr().out
        assert not ended.value.code and said in out, out


def test_sizes_must_be_those_of_whole_records():
    dtype = np.dtype([("version", "u1"), ("a", "<u2", (2,)), ("b", "<f4")])
    for sizes, said in (
        (("version", {1: 5, 2: 8}), "the largest must be the 9 bytes"),
        (("version", {1: 4, 2: 9}), r"must hold whole fields, but one of 4 bytes cuts \['a'\]"),
        (("b", {1: 5, 2: 9}), "the field a whole number"),
        (("version", {1: 9, 2: 9}), "sizes must differ"),
        (("version", {300: 5, 2: 9}), r"sizes\['version'\]"),
        ((["version"], {1: 5, 2: 9}), "the field a whole number"),
        (5, "a field and its values' bytes"),
    ):
        with pytest.raises(SchemaError, match=said):
            loaderd.FixedRecords(dtype, sizes=sizes)  # type: ignore[arg-type]
    records = loaderd.FixedRecords(dtype, sizes=("version", {1: 5, 2: 9}), fill={"b": np.nan})
    assert records == pickle.loads(pickle.dumps(records)) and records != loaderd.FixedRecords(dtype)
    with pytest.raises(SchemaError, match=r"lacks \['b'\], by which records are checked"):
        loaderd.FixedRecords(dtype, expect={"b": 1}, sizes=("version", {1: 5, 2: 9}))


# --------------------------------------------------------------------------------- a window of the newest games

TRAINING = """
import json, sys
import loaderd

games = loaderd.Dataset("*.tar", loaderd.schemas.lc0(targets="all"), shuffle=loaderd.Shuffle(64, 16), refresh="epoch")
with loaderd.Loader(games.newest(shards=3), batch_size=16, epochs=2, workers=2) as loader:
    if sys.argv[1:]:
        loader.load_state_dict(json.loads(sys.argv[1]))
    for batch in loader:
        print(*map(int, batch["values"][:, 0, 2]), flush=True)
        input(json.dumps(loader.state_dict()) + "\\n")
"""


class Training:
    """The program, in the folder of the tars; it takes a batch whenever it is told."""

    def __init__(self, folder: Path, state: str = "") -> None:
        command = [sys.executable, "-c", TRAINING, *([state] if state else [])]
        self._process = subprocess.Popen(command, cwd=folder, stdin=-1, stdout=-1, text=True)
        self.numbers: list[int] = []
        self.state = state

    def take(self, batches: int | None = None) -> None:
        """So many batches, or all that are left, and their numbers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for _ in itertools.count() if batches is None else range(batches):
            if not (line := self._process.stdout.readline()):
                break
            self.numbers += map(int, line.split())
            self.state = self._process.stdout.readline()
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_the_newest_games_while_tars_arrive(tmp_path: Path, write_tar: Callable[..., Path]):
    """Three tars an epoch, of both versions. The training is killed, and begins again where it last said it was."""
    hours: list[list[int]] = []

    def arrive() -> None:
        hour, first, members = len(hours), sum(map(len, hours)), []
        for game in range(3):
            version = 6 + (hour + game) % 2
            records = np.frombuffer(b"".join(random_records(17 + hour, version, 1)), DTYPES[version]).copy()
            records["plies_left"] += first + len(records) * game
            members.append((f"{game}.gz", gzip.compress(records.tobytes(), 1)))
        hours.append([*range(first, first + 3 * (17 + hour))])
        write_tar(tmp_path / "unfinished", members).rename(tmp_path / f"2026-11-28-{hour:02}.tar")

    for _ in range(4):
        arrive()
    first_window = [number for hour in hours[1:4] for number in hour]
    training = Training(tmp_path)
    training.take(4)
    arrive()
    training.take(2)
    state, taken = training.state, [*training.numbers]
    training.take(1)  # which is lost: the state is that of the batch before
    training.kill()
    arrive()
    resumed = Training(tmp_path, state)
    resumed.take()
    numbers = [*taken, *resumed.numbers]
    assert sorted(numbers[: len(first_window)]) == first_window and numbers[: len(first_window)] != first_window
    assert sorted(numbers[len(first_window) :]) == [number for hour in hours[3:6] for number in hour]
    again = Training(tmp_path, state)
    again.take()
    assert again.numbers == resumed.numbers and training.numbers[len(taken) :] == resumed.numbers[:16]
