"""``loaderd verify`` and ``loaderd index``: what they find, what they keep, and how they end."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd import testing
from loaderd.schemas import kata, leela
from tests.helpers.commands import COMMAND, run


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return testing.write_shards(tmp_path / "shards", {"number": np.arange(1000)}, num_shards=4)


def test_every_damage_is_named_with_its_place(paths: list[Path]):
    first = testing.damage(paths[1], record=3)
    second = testing.damage(paths[1], record=100, how="length")
    third = testing.damage(paths[3], record=249, how="cut")
    places = [(paths[1], 3, first), (paths[1], 100, second), (paths[3], 249, third)]
    pattern = str(paths[0].parent / "*")
    done = run("verify", pattern)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    for line, (path, record, offset) in zip(lines, places, strict=False):
        assert line.startswith(f"{path}: record {record} at byte {offset}: expected ") and ", found " in line
    assert "997 healthy records" in lines[3] and "3 damages in 2 of them" in lines[3]
    told = [json.loads(line) for line in run("verify", pattern, "--json").stdout.splitlines()]
    damages = [one for one in told if one["kind"] == "damage"]
    assert [(one["shard"], one["record"], one["offset"]) for one in damages] == [
        (str(path), record, offset) for path, record, offset in places
    ]
    assert all(one["expected"] and one["found"] for one in damages)
    assert [one["records"] for one in told if one["kind"] == "shard"] == [250, 248, 250, 249]
    assert (told[-1]["kind"], told[-1]["damages"], told[-1]["records"]) == ("total", 3, 997)


def test_records_that_pass_are_counted(tmp_path: Path, paths: list[Path]):
    (tmp_path / "mine.py").write_text(
        "import loaderd\n"
        "schema = loaderd.Schema({'number': loaderd.Int64()}, {'number': loaderd.Array('number')})\n"
        "train = loaderd.Dataset('*', schema, where=loaderd.Derived(lambda number: number % 10 == 3, 'number'))\n"
        "weight = loaderd.Derived(lambda number: number % 4, 'number')\n"
        "weighed = loaderd.Dataset('*', schema, sample=loaderd.Sample(0.5, weight))\n"
        "only = loaderd.Dataset('*', schema, sample=0.5)\n"
        "def refuse(number):\n    if 260 in number: raise ValueError('never seen')\n    return number > 0\n"
        "refused = loaderd.Derived(refuse, 'number')\n"
    )
    testing.damage(paths[0], record=3)
    names, of = [str(path) for path in paths], ("--schema", "mine:schema", "--where")
    run_here = partial(run, folder=tmp_path)
    done = run_here("verify", *names, *of, "mine:train")
    assert "99 of 999 healthy records pass where=mine.<lambda>" in done.stdout.splitlines()
    told = [json.loads(line) for line in run_here("verify", *names, *of, "mine:train", "--json").stdout.splitlines()]
    assert [one["passing"] for one in told if one["kind"] != "damage"] == [24, 25, 25, 25, 99]
    done = run_here("verify", *names, *of, "mine:refused")
    assert done.returncode == 2 and f"{paths[1]}: record 10: expected a bool of where=mine.refuse" in done.stderr
    done = run_here("verify", *names, *of, "mine:weighed")
    assert "sample=mine.<lambda>: they weigh 1,497 together" in done.stdout.splitlines()
    assert json.loads(run_here("inspect", names[1], *of, "mine:weighed", "--json").stdout)["weight"] == 377
    done = run_here("inspect", names[1], *of, "mine:train")
    assert done.stdout.splitlines()[1] == "25 of 250 records pass where=mine.<lambda>"
    must = "must be a loaderd.Derived, or a Dataset with where= or a weight of sample=, got Dataset without"
    assert must in run_here("inspect", names[1], *of, "mine:only").stderr
    assert "--where needs --schema" in run_here("inspect", names[1], "--where", "mine:train").stderr


@pytest.mark.parametrize("packed", [False, True])
def test_records_that_do_not_match_the_schema_are_counted(tmp_path: Path, paths: list[Path], packed: bool):
    (tmp_path / "mine.py").write_text(
        "from loaderd import Array, Int64, Schema\n"
        "number = Schema({'number': Int64()}, {'number': Array('number')})\n"
        "both = Schema({'number': Int64(), 'other': Int64()}, {'number': Array('number'), 'other': Array('other')})\n"
    )
    testing.write_shards(tmp_path / "other", {"number": np.arange(2000), "other": np.arange(2000)}, num_shards=1)
    (other,) = (tmp_path / "other").iterdir()
    paths[1].write_bytes(other.read_bytes() + paths[1].read_bytes())
    if packed:
        paths[1].write_bytes(gzip.compress(paths[1].read_bytes()))
    damaged = testing.damage(paths[3], record=7)
    names = [str(paths[1]), str(paths[2]), str(paths[3])]
    run_here = partial(run, folder=tmp_path)
    assert run_here("verify", *names[:2], "--schema", "mine:number").returncode == 0
    done = run_here("verify", *names, "--schema", "mine:both")
    assert done.returncode == 1 and not done.stderr
    lacking = "expected feature 'other', found features ['number']"
    first, second, damage, third, total, _ = done.stdout.splitlines()
    assert first.startswith(f"250 of 2,250 records of {paths[1]} do not match the schema; the first: {paths[1]}: ")
    assert "record 2000 at byte" in first and first.endswith(lacking)
    assert second.startswith(f"250 of 250 records of {paths[2]} do not match") and "record 0 at byte 0" in second
    assert damage.startswith(f"{paths[3]}: record 7 at byte {damaged}: expected")
    assert third.startswith(f"249 of 249 records of {paths[3]} do not match"), "a damaged one is no mismatch"
    assert total.endswith("1 damage in 1 of them, 749 records in 3 of them not as the schema says")
    told = [
        json.loads(line) for line in run_here("verify", *names, "--schema", "mine:both", "--json").stdout.splitlines()
    ]
    assert [(one["shard"], one["mismatches"]) for one in told if one["kind"] == "shard"] == [
        *zip(names, [250, 250, 249], strict=True)
    ]
    assert [one["record"] for one in told if one["kind"] == "mismatch"] == [2000, 0, 0]
    assert (told[-1]["kind"], told[-1]["mismatches"], told[-1]["damages"]) == ("total", 749, 1)


def test_files_that_are_no_shards_are_named_with_what_to_do(paths: list[Path], tmp_path: Path):
    paths[2].write_text("<!DOCTYPE html>\n<html>Sign in</html>\n")
    np.savez(tmp_path / "own.npz", number=np.arange(5))
    done = run("verify", *map(str, paths), str(tmp_path / "own.npz"))
    assert done.returncode == 1 and "750 healthy records" in done.stdout and not done.stderr
    assert f"{paths[2]} is a page of HTML, and not a TFRecord file" in done.stdout and "download it" in done.stdout
    assert "own.npz is a zip archive (as an .npz is), and not" in done.stdout and "FixedRecords" in done.stdout
    told = [json.loads(line) for line in run("verify", *map(str, paths), "--json").stdout.splitlines()]
    assert [one["found"] for one in told if one["kind"] == "damage"] == ["one that is a page of HTML"]


def test_wrong_arguments_and_no_shards_are_another_status(tmp_path: Path, paths: list[Path]):
    for command in ("verify", "index"):
        assert run(command).returncode == 2
        missing = run(command, str(tmp_path / "none" / "*"))
        assert missing.returncode == 2 and "Traceback" not in missing.stderr and "none" in missing.stderr
        wrong = run(command, str(paths[0]), "--threads", "0")
        assert wrong.returncode == 2 and "--threads must be a positive integer, got 0" in wrong.stderr


def test_an_index_is_made_once_for_each_size_of_block(tmp_path: Path, paths: list[Path]):
    options = [str(paths[0].parent / "*"), "--index-cache", str(tmp_path / "kept")]
    first, second = run("index", *options), run("index", *options)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "4 indexed in" in first.stdout and "0 indexed in" in second.stdout and "4 known before" in second.stdout
    assert len(list((tmp_path / "kept").rglob("*.loaderd-index"))) == 1, "small shards are kept together"
    assert "4 indexed in" in run("index", *options, "--block-records", "7").stdout


def test_a_loader_takes_the_index_that_was_kept(paths: list[Path]):
    import loaderd

    assert run("index", str(paths[0].parent / "*.tfrecord"), "--index-cache", "beside").returncode == 0
    for path in paths:  # what a second look at the shard would find; its size and time are as before
        status = path.stat()
        testing.damage(path, record=0)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    schema = testing.schema_of({"number": np.arange(1000)})
    with loaderd.Loader(
        paths, schema, batch_size=100, workers=1, index_cache="beside", on_corrupt="skip_record"
    ) as loader:
        assert len(loader) == 10, "the index knows of no damage"


def test_damage_and_an_index_that_cannot_be_kept_are_said(tmp_path: Path, paths: list[Path]):
    testing.damage(paths[0], record=9)
    damaged = run("index", *map(str, paths), "--index-cache", str(tmp_path / "kept"))
    assert damaged.returncode == 1 and "1 damage: loaderd verify" in damaged.stderr
    (tmp_path / "file").touch()
    unkept = run("index", *map(str, paths), "--index-cache", str(tmp_path / "file"))
    assert unkept.returncode == 2 and "4 of 4 indexes cannot be kept" in unkept.stderr
    assert f"{tmp_path / 'file'}: " in unkept.stderr and "Errno" not in unkept.stderr


@pytest.mark.parametrize("command", ["verify", "index"])
def test_ctrl_c_ends_it_at_once_and_quietly(tmp_path: Path, command: str):
    """On a terminal, where a progress bar says that it has begun, and a shard of a terabyte, most of it a hole."""
    hole = tmp_path / "hole.tfrecord"
    testing.write_shards(tmp_path, [b"x"])[0].rename(hole)
    os.truncate(hole, 1 << 40)  # it would take an hour
    terminal, end = pty.openpty()
    options = ["--index-cache", "none"] if command == "index" else []
    process = subprocess.Popen([COMMAND, command, str(hole), *options], stderr=end)
    os.close(end)
    shown = b""
    while b"shards" not in shown:
        shown += os.read(terminal, 1000)
    process.send_signal(signal.SIGINT)
    try:
        while True:
            shown += os.read(terminal, 1000)
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 130
    assert b"Traceback" not in shown
    os.close(terminal)


def write_game(folder: Path, count: int = 20) -> Path:
    """A gzip file of records of Leela Chess Zero; all but versions and counts is zeros."""
    records = np.zeros(count, leela.RECORD_V6)
    records["version"], records["input_format"], records["rule50_count"] = 6, 1, np.arange(count)
    path = folder / "game.gz"
    path.write_bytes(gzip.compress(records.tobytes()))
    return path


def write_rows(folder: Path, count: int = 30) -> Path:
    """An npz of KataGo, of a smaller board and more targets than it has by default."""
    rows = np.zeros(count, kata.rows(9, 80))
    np.savez_compressed(folder / "rows.npz", **{name: rows[name] for name in rows.dtype.names or ()})
    return folder / "rows.npz"


def totals(*arguments: str) -> dict[str, Any]:
    """Of all shards, as verify has them."""
    return json.loads(run("verify", *arguments, "--json").stdout.splitlines()[-1])


def test_content_tells_what_records_are(tmp_path: Path, paths: list[Path]):
    game, rows = write_game(tmp_path), write_rows(tmp_path)
    tar = tmp_path / "games.tar"
    with tarfile.open(tar, "w") as out:
        out.add(game, "1.gz")
        out.add(paths[0], "LICENSE")
        out.add(game, "2.gz")
    plain = tmp_path / "plain"
    plain.write_bytes(gzip.decompress(game.read_bytes()))
    packed = testing.write_shards(tmp_path / "packed", {"number": np.arange(7)}, compression="gzip")
    every = [game, rows, tar, plain, *paths, *packed]
    found = totals(*map(str, every))
    assert (found["records"], found["damages"]) == (20 + 30 + 40 + 20 + 1000 + 7, 0)
    assert found["may_lack_checksums"] == 1, "the plain one"
    said = run("verify", str(plain)).stdout
    assert (
        "no damage found\n1 shard of a kind that need not have checksums: only sizes" in said
        and "all is well" not in said
    )


def test_a_schema_says_what_content_does_not_tell(tmp_path: Path):
    (tmp_path / "records").write_bytes(b"abcd" * 9 + b"abc")
    (tmp_path / "mine.py").write_text(
        "import loaderd\n"
        "records = loaderd.FixedRecords([('letters', 'S4')])\n"
        "schema = loaderd.Schema(records, {'letters': loaderd.Array('letters')})\n"
    )
    done = run("verify", "records", "--schema", "mine:schema", "--json", folder=tmp_path)
    damage, shard, total = map(json.loads, done.stdout.splitlines())
    assert total["may_lack_checksums"] == 1
    assert done.returncode == 1 and shard["records"] == 9
    assert (damage["record"], damage["offset"], damage["found"]) == (9, 36, "3 bytes")


def test_empty_shards_are_counted(paths: list[Path]):
    for path in paths[1:3]:
        path.write_bytes(b"")
    done = run("verify", *map(str, paths))
    assert done.returncode == 0 and "4 shards (2 of them empty), 500 healthy records" in done.stdout, done
    total = json.loads(run("verify", *map(str, paths), "--json").stdout.splitlines()[-1])
    assert (total["shards"], total["empty_shards"]) == (4, 2)
