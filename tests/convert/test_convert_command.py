"""``loaderd convert`` as its users run it: what it says, what it refuses, and what a kill leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.process_tree import process_tree

import loaderd
from loaderd import testing
from loaderd.cli.main import main
from loaderd.convert.conversion import LOCK
from tests.helpers import commands
from tests.helpers.serving import handles_of, wait_ends

COMMAND = [commands.COMMAND, "convert"]
MODULE = """
import loaderd
import numpy as np
from loaderd import testing
schema = testing.schema_of({"number": np.zeros(1, int), "bytes": np.zeros((1, 500), "u1")})
rows = loaderd.Schema(loaderd.FixedRecords([("number", "<i8")]), {"number": loaderd.Array("number")})
halves = loaderd.Schema({"number": loaderd.Int64(), "bytes": loaderd.Raw("bfloat16", 250)}, schema.fields)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a module ``mine`` that has a schema, and four shards of it."""
    (tmp_path / "mine.py").write_text(MODULE)
    arrays = {"number": np.arange(4000), "bytes": np.random.default_rng(0).integers(0, 256, (4000, 500), np.uint8)}
    testing.write_shards(tmp_path / "from", arrays, num_shards=4)
    return tmp_path


def run(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return commands.run("convert", *arguments, folder=folder)


OPTIONS = ("from/*", "--schema", "mine:schema", "--records-per-shard", 150)


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("shard-*")}


def test_shards_are_written_by_several_processes_and_told_of(folder: Path):
    done = run(folder, *OPTIONS, "--to", "to", "--json", "--processes", 2)
    assert done.returncode == 0, done.stderr
    *shards, total = map(json.loads, done.stdout.splitlines())
    assert (total["kind"], total["shards"], total["records"], total["were_there"]) == ("total", 27, 4000, 0)
    assert sorted(one["shard"] for one in shards) == sorted(shards_in(folder / "to"))
    assert sum(one["num_bytes"] for one in shards) == total["bytes"]
    assert sum(map(len, shards_in(folder / "to").values())) == total["bytes"]
    again = run(folder, *OPTIONS, "--to", "to")
    assert again.returncode == 0 and "27 shards, 4,000 records" in again.stdout
    assert "27 of these shards were there already" in again.stdout
    run(folder, *OPTIONS, "--to", "alone", "--processes", 1)
    assert shards_in(folder / "alone") == shards_in(folder / "to"), "whatever the number of processes"


def begin_and_end(folder: Path, number: int) -> bool:
    """A conversion to ``to`` gets a signal as soon as there are two shards; returns whether it was not over before.

    From the first shard on it takes tenths of a second, for which this process may have no core.
    """
    shutil.rmtree(folder / "to", ignore_errors=True)
    arguments = [*COMMAND, *map(str, OPTIONS), "--to", "to", "--compression", "gzip"]
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and len(shards_in(folder / "to")) < 2:
        time.sleep(0.005)
    handles = handles_of(process_tree(process.pid)[1:])
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    wait_ends(handles)  # with the one that was killed
    assert process.returncode in (0, 130 if number == signal.SIGINT else -number) and b"Traceback" not in errors
    return process.returncode != 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_one_that_is_ended_goes_on_where_it_was(folder: Path, number: int):
    expected = run(folder, *OPTIONS, "--to", "whole", "--compression", "gzip")
    assert expected.returncode == 0
    assert any(begin_and_end(folder, number) for _ in range(5)), "it is over before it can be ended"
    left = shards_in(folder / "to")
    whole = shards_in(folder / "whole")
    assert 2 <= len(left) < len(whole)
    assert all(whole[name] == data for name, data in left.items()), "what has its name is whole"
    times = {path.name: path.stat().st_mtime_ns for path in (folder / "to").glob("shard-*")}
    again = run(folder, *OPTIONS, "--to", "to", "--compression", "gzip", "--json")
    total = json.loads(again.stdout.splitlines()[-1])
    assert again.returncode == 0 and total["were_there"] == len(left)
    assert shards_in(folder / "to") == whole
    assert all((folder / "to" / name).stat().st_mtime_ns == time_ns for name, time_ns in times.items())
    assert not list((folder / "to").glob(".shard*"))


@pytest.mark.one_variant
@pytest.mark.parametrize("format", ["tfrecord", "npz"])
def test_where_nothing_more_can_be_written_it_says_where(folder: Path, format: str):
    """No file may have more than 40 KiB: to a writer, that is as a full disk."""
    command = shlex.join([*COMMAND, *map(str, OPTIONS), "--to", "to", "--format", format, "--processes", "1"])
    limited = ["bash", "-c", f"ulimit -f 40; exec {command}"]
    done = subprocess.run(limited, cwd=folder, capture_output=True, text=True, timeout=60)
    said = f"^{folder}/to/shard-00000.* cannot be written: File too large\nFinished shards stay"
    assert done.returncode == 2 and re.match(said, done.stderr), done
    assert not list((folder / "to").glob("*shard-00000*"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """(exit status, output, errors) of the command in this process: it ends before it starts others."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_what_cannot_be_converted_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    testing.write_shards(folder / "other", [b"x"])
    assert run(folder, *OPTIONS, "--to", "to").returncode == 0
    for arguments, said in [
        (["from/*", "--to", "new"], "--schema is needed, as the content of 00000.tfrecord"),
        (["none/*", "--to", "new"], "There is no folder"),
        (
            ["from/*", "--schema", "mine:halves", "--to", "new", "--format", "npz"],
            "cannot hold feature 'bytes': .npy",
        ),
        ([*OPTIONS, "--to", "new", "--format", "npz", "--compression", "zlib"], "one of none, gzip, got zlib"),
        ([*OPTIONS, "--to", "new", "--records-per-shard", "0"], "--records-per-shard must be a positive integer"),
        ([*OPTIONS, "--to", "new", "--processes", "0"], "--processes must be"),
        ([*OPTIONS, "--to", "~nosuchuser/x"], "--to ~nosuchuser/x is no folder: Could not determine home"),
        ([*OPTIONS, "--to", "mine.py/\33]0;x"], f"{folder}/mine.py/\\x1b]0;x cannot be written: Not a directory"),
        ([*OPTIONS, "--to", "other"], f"--to {folder / 'other'} holds other files: 00000.tfrecord"),
        ([*OPTIONS, "--to", "to", "--compression", "gzip"], "holds other files: shard-00000-of-00027.tfrecord, …"),
        ([*OPTIONS, "--to", "to", "--records-per-shard", "9"], "holds other files: shard-00000-of-00027.tfrecord, …"),
    ]:
        status, _, errors = refused(capsys, *arguments)
        assert status == 2 and said in errors, (arguments, errors)
    assert [path.name for path in (folder / "other").iterdir()] == ["00000.tfrecord"], "as it was"


def test_damage_stops_it_before_anything_is_written_or_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    path = folder / "from" / "00001.tfrecord"
    testing.damage(path, record=3)
    status, told, errors = refused(capsys, *OPTIONS, "--to", "new", "--json")
    assert status == 1 and "so nothing is written" in errors and not (folder / "new").exists()
    (damage,) = map(json.loads, told.splitlines())
    assert (damage["kind"], damage["shard"], damage["record"]) == ("damage", str(path), 3)
    skipped = run(folder, *OPTIONS, "--to", "new", "--on-corrupt", "skip_record")
    assert skipped.returncode == 0 and "3,999 records" in skipped.stdout and "1 record left out" in skipped.stdout


def test_after_an_error_it_goes_on_without_the_record(folder: Path):
    """As the error says."""
    testing.write_shards(folder / "more", [b"no example"])
    (folder / "more" / "00000.tfrecord").rename(folder / "from" / "more.tfrecord")
    skipping = [*OPTIONS, "--processes", 1, "--on-corrupt", "skip_record"]
    stopped = run(folder, *OPTIONS, "--processes", 1, "--to", "to")
    assert stopped.returncode == 1 and '--on-corrupt "skip_record" to go on without' in stopped.stderr
    left = shards_in(folder / "to")
    for were_there in (len(left), 27):
        done = run(folder, *skipping, "--to", "to")
        assert done.returncode == 0 and "1 record left out" in done.stdout, done.stderr
        assert f"{were_there} of these shards were there already" in done.stdout
    run(folder, *skipping, "--to", "new")
    assert left.items() <= shards_in(folder / "to").items() and shards_in(folder / "to") == shards_in(folder / "new")


def test_a_source_that_cannot_be_read_is_named_when_it_is_left_out(folder: Path):
    for number in range(3):
        np.savez(folder / "from" / f"{number}.npz", number=np.arange(100))
    cut = folder / "from" / "1.npz"
    cut.write_bytes(cut.read_bytes()[:-20])
    options = ["from/*.npz", "--schema", "mine:rows", "--to", "new", "--on-corrupt", "skip_record", "--processes", 1]
    done = run(folder, *options)
    assert "200 records" in done.stdout and "left out" not in done.stdout
    assert "1 of 3 sources cannot be read, and left out:\n" in done.stderr and "1.npz" in done.stderr
    total = json.loads(run(folder, *options, "--json").stdout.splitlines()[-1])
    assert (total["left_out"], total["sources_left_out"]) == (0, 1)


@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record"])
def test_a_source_of_another_kind_is_refused(folder: Path, on_corrupt: str):
    (folder / "from" / "README.md").write_text("Four shards, each of a thousand records.\n")
    done = run(folder, *OPTIONS, "--to", "new", "--on-corrupt", on_corrupt)
    assert done.returncode == 2 and "README.md is text, and not a TFRecord file" in done.stderr
    assert "If it is no shard, name the shards" in done.stderr and "skip_record" not in done.stderr
    assert not shards_in(folder / "new")


def test_a_folder_of_another_conversion_is_refused_and_gets_no_shard(folder: Path):
    """One with the same options, of another source: its name does not tell, only what is in the shards."""
    arrays = {"number": np.arange(1, 4001), "bytes": np.zeros((4000, 500), np.uint8)}
    testing.write_shards(folder / "other", arrays, num_shards=4)
    assert run(folder, *OPTIONS, "--to", "to").returncode == 0
    for number in range(20):
        (folder / "to" / f"shard-{number:05}-of-00027.tfrecord").unlink()
    before = shards_in(folder / "to")
    done = run(folder, "other/*", *OPTIONS[1:], "--to", "to", "--processes", 2)
    assert done.returncode == 2 and "holds another conversion: shard-0002" in done.stderr
    assert shards_in(folder / "to") == before and len(before) == 7


def test_only_its_own_temporary_files_are_removed(folder: Path):
    (folder / "to").mkdir()
    kept = [".shard-\33]0;x.tmp", ".shard-00000-of-00028.tfrecord.1.tmp", ".shard-00001-of-00027.tfrecord.1.tmp"]
    for name in kept:
        (folder / "to" / name).mkdir()
    for name in (".shard-00000-of-00027.tfrecord.17.tmp", ".shard-00026-of-00027.tfrecord.17.tmp.rows.tmp"):
        (folder / "to" / name).touch()
    done = run(folder, *OPTIONS, "--to", "to")
    assert done.returncode == 0 and not done.stderr
    assert sorted(path.name for path in (folder / "to").glob(".shard-*")) == sorted(kept)


@pytest.fixture
def locked(folder: Path) -> Iterator[Path]:
    """A folder to which another conversion writes."""
    (folder / "to").mkdir()
    with (folder / "to" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def test_two_conversions_do_not_write_to_one_folder(
    locked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(locked)
    status, _, errors = refused(capsys, *OPTIONS, "--to", "to")
    assert status == 2 and "is being written by another conversion" in errors


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_where_the_file_system_has_no_locks_it_goes_on_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
):
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.chdir(folder)
    monkeypatch.setattr("fcntl.flock", flock)
    status, _, errors = refused(capsys, *OPTIONS, "--to", "to")
    assert (status, "Input/output error" in errors) == ((0, False) if number == errno.ENOSYS else (2, True))


def test_a_link_in_the_place_of_its_lock_is_not_followed(folder: Path):
    (folder / "to").mkdir()
    for name in ("precious", "none"):
        (folder / "to" / LOCK).symlink_to(folder / name)
        (folder / "precious").write_text("precious")
        done = run(folder, *OPTIONS, "--to", "to")
        assert done.returncode == 2 and f"{LOCK} cannot be written: Too many levels of symbolic links" in done.stderr
        assert (folder / "precious").read_text() == "precious" and not (folder / "none").exists()
        (folder / "to" / LOCK).unlink()
    os.mkfifo(folder / "to" / LOCK)
    assert run(folder, *OPTIONS, "--to", "to").returncode == 0


@pytest.mark.slow
def test_games_are_told_by_their_content(tmp_path: Path, lc0_games: list[Path], write_tar: Callable[..., Path]):
    members = [(f"hour/training.{number}.gz", game.read_bytes()) for number, game in enumerate(lc0_games)]
    tar = write_tar(tmp_path / "hour.tar", [("hour/LICENSE", b"ODbL\n" * 99), *members])
    assert run(tmp_path, tar, "--to", "to").returncode == 0
    schema = loaderd.schemas.lc0()
    sums = []
    for shards, one in ((tar, schema), (tmp_path / "to" / "*.tfrecord", schema.as_examples())):
        with loaderd.Loader(shards, one, batch_size=50, shuffle=False, workers=1) as loader:
            sums.append([{name: values.tobytes() for name, values in batch.items()} for batch in loader])
    assert sums[0] == sums[1] and len(sums[0]) > 2
