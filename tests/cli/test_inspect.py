"""``loaderd inspect``: what it says of shards, of records, and the schemas that it proposes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import testing
from loaderd.errors import install_hint
from loaderd.schema import grids
from tests.helpers.commands import COMMAND, run

BOARDS = np.zeros((300, 3, 3, 2), bool)
BOARDS[7, 1, 2, 0] = BOARDS[7, 0, 0, 1] = BOARDS[7, 0, 1, 1] = True
ARRAYS = {
    "board": BOARDS,
    "move": np.arange(900).reshape(300, 3),
    "score": np.linspace(0, 1, 300, dtype=np.float32),
    "id": np.array([f"game-{number % 7}".encode() for number in range(300)]),
    "number": np.arange(300),
}


def inspect(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("inspect", *arguments, folder=folder)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """With a module ``boards`` beside it, which has a ``schema``."""
    text = """
import loaderd
schema = loaderd.Schema(
    {"board": loaderd.PackedBits(18), "score": loaderd.Float()},
    {"board": loaderd.Bits("board", (3, 3, 2), scale=(1, -1)), "score": loaderd.Array("score")},
)
"""
    (tmp_path / "boards.py").write_text(text)
    return testing.write_shards(tmp_path / "shards", ARRAYS, compression="gzip")[0]


def test_a_shard_is_summed_up(shard: Path):
    told = json.loads(inspect(shard, "--json", "--sample", 100).stdout)
    assert (told["compression"], told["records"], told["sample"]["records"]) == ("gzip", 300, 100)
    assert told["features"]["move"] == {"types": ["int64"], "records": 100, "values": [3, 3], "bytes": None}
    assert told["features"]["board"] == {"types": ["bytes"], "records": 100, "values": [1, 1], "bytes": [3, 3]}
    text = inspect(shard).stdout
    assert "300 healthy records" in text and "compression gzip" in text and "300 of 300" in text


def test_damage_and_what_is_no_example_are_said(tmp_path: Path):
    (path,) = testing.write_shards(tmp_path, [b"\xff" * 9, b"", b"abc"])
    offset = testing.damage(path, record=2)
    told = json.loads(inspect(path, "--json").stdout)
    assert told["sample"]["no_examples"] == [0] and told["records"] == 2
    (damage,) = told["damages"]
    assert (damage["record"], damage["offset"]) == (2, offset)
    assert "1 damage, the first:" in inspect(path).stdout


def test_the_first_healthy_record_is_shown_unless_another_is_asked_for(tmp_path: Path):
    arrays = {"number": np.arange(3)}
    (path,) = testing.write_shards(tmp_path, arrays)
    (tmp_path / "counted.py").write_text(
        "import numpy, loaderd.testing\nschema = loaderd.testing.schema_of({'number': numpy.arange(3)})\n"
    )
    command = [path, "--schema", "counted:schema"]
    testing.damage(path, record=0)
    assert "Record 1, " in inspect(*command, folder=tmp_path).stdout
    assert "The last healthy one is 2" in inspect(path, "--record", 0).stderr
    path.write_bytes(b"")
    assert "The last healthy one is none" in inspect(*command, folder=tmp_path).stderr


def test_a_record_is_shown_as_it_is_stored_and_as_it_is_delivered(shard: Path, tmp_path: Path):
    stored = json.loads(inspect(shard, "--record", 7, "--json").stdout)["values"]
    assert stored["move"] == [21, 22, 23] and stored["number"] == [7] and stored["id"] == [b"game-0".hex()]
    command = [shard, "--record", 7, "--schema", "boards:schema"]
    fields = json.loads(inspect(*command, "--json", folder=tmp_path).stdout)["fields"]
    np.testing.assert_array_equal(fields["board"], BOARDS[7] * [1.0, -1.0])
    assert fields["score"] == pytest.approx(ARRAYS["score"][7])
    drawn = inspect(*command, folder=tmp_path).stdout
    assert "plane 0   plane 1\n· · ·     □ □ ·\n· · ■     · · ·\n· · ·     · · ·\n" in drawn
    assert "all 0: planes 0, 1" in inspect(shard, "--schema", "boards:schema", folder=tmp_path).stdout


def test_planes_become_a_picture(shard: Path, tmp_path: Path):
    from matplotlib.image import imread

    command = [shard, "--record", 7, "--schema", "boards:schema", "--png", "board.png"]
    assert inspect(*command, folder=tmp_path).returncode == 0
    pixels = (imread(tmp_path / "board.png")[:, :, :3] * 255).round().astype(int)
    red, blue, white = (103, 0, 31), (5, 48, 97), (255, 255, 255)
    squares = [[4 + 16 + 32 * number for number in range(3)], [4 + 96 + 4 + 16 + 32 * number for number in range(3)]]
    shown = [[[tuple(pixels[row, column]) for column in plane] for row in squares[0]] for plane in squares]
    assert shown[0] == [[white] * 3, [white, white, red], [white] * 3], "what is above 0"
    assert shown[1] == [[blue, blue, white], [white] * 3, [white] * 3], "what is below"
    assert pixels.shape == (104, 204, 3)


def test_without_pillow_it_says_what_to_install(shard: Path, tmp_path: Path):
    (tmp_path / "PIL.py").write_text("raise ImportError\n")
    command = [COMMAND, "inspect", str(shard), "--schema", "boards:schema", "--png", "board.png"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"--png needs Pillow: {install_hint('images')}\n")


def test_values_that_are_not_finite_are_white_and_change_no_other_colour():
    plane = np.array([[np.nan, 4.0], [-4.0, 0.0]])
    for value in (np.nan, np.inf, -np.inf):
        plane[0, 0] = value
        assert np.array_equal(
            grids.picture(plane[None]), grids.picture(np.nan_to_num(plane, posinf=0, neginf=0)[None])
        )
    assert grids.draw(np.array([[[np.nan, 0.0]]]), 80) == "plane 0\nnan   0"


def test_the_proposed_schema_loads_these_records(shard: Path, tmp_path: Path):
    module = inspect(shard, "--features").stdout
    names: dict[str, Any] = {}
    exec(compile(module, "proposed.py", "exec"), names)
    with loaderd.Loader(shard, names["schema"], batch_size=300, shuffle=False, workers=1) as loader:
        (batch,) = loader
        for name in ("move", "score", "id", "number"):
            np.testing.assert_array_equal(batch[name], ARRAYS[name])
        np.testing.assert_array_equal(batch["board"][:, :18], BOARDS.reshape(300, 18))
    (tmp_path / "proposed.py").write_text(module)
    shown = inspect(shard, "--record", 4, "--schema", "proposed:schema", "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["fields"]["id"] == "game-4"


def said_in(module: str) -> str:
    """Its comments, each in one line."""
    return " ".join(re.findall(r"^ *# (\S.*)$", module, re.M))


def sequence_example(name: bytes) -> bytes:
    """A tf.train.SequenceExample with an empty context, and one empty feature list."""
    entry = b"\x0a" + bytes([len(name)]) + name + b"\x12\x00"
    entry = b"\x0a" + bytes([len(entry)]) + entry
    return b"\x0a\x00" + b"\x12" + bytes([len(entry)]) + entry


def test_the_proposed_schema_reads_all_shards_that_are_named(tmp_path: Path):
    rng = np.random.default_rng(3)
    parts = []
    for number, (size, moves) in enumerate([(6, 2), (9, 5), (7, 1)]):
        part = {
            "board": rng.integers(0, 256, (40, 194), np.uint8),
            "flags": rng.integers(0, 256, (40, 3), np.uint8),
            "policy": rng.random((40, 361), np.float32),
            "half": rng.random((40, 361)).astype(np.float16),
            "planes": rng.random((40, 6144), np.float32),
            "id": np.array([b"x" * size] * 40),
            "moves": np.full((40, moves), number, np.int64),
        }
        if number == 1:
            del part["flags"]
        parts.append(part)
        (path,) = testing.write_shards(tmp_path / str(number), part)
        path.rename(tmp_path / f"{number}.tfrecord")
    module = inspect(tmp_path / "?.tfrecord", "--features", "--sample", 60).stdout
    said = said_in(module)
    assert "from 60 records of 3 of 3 shards." in module
    assert "20 of 60 records lack it and get the default. They are in '1.tfrecord'." in said
    assert "Its values have 6 to 9 bytes; shorter ones are padded." in said
    assert "Its lists have 1 to 5 values; shorter ones are padded, and cut=True would cut longer ones." in said
    assert '#  "planes": loaderd.Array("planes", shape=(8, 8, 96)),' in module
    assert '#  "policy": loaderd.Array("policy", shape=(19, 19)),' in module
    assert '#  "half": loaderd.PackedBits(5776),' in module
    assert '"flags": loaderd.PackedBits(24, default=bytes(3)),' in module
    (tmp_path / "records.py").write_text(module)
    program = """
import loaderd, records
with loaderd.Loader("?.tfrecord", records.schema, batch_size=120, shuffle=False, workers=1) as loader:
    (batch,) = loader
    assert batch["moves"].shape == (120, 5) and list(batch["moves"][80]) == [2, -1, -1, -1, -1], batch["moves"][80]
    assert list(batch["id"][::40]) == [b"x" * 6, b"x" * 9, b"x" * 7] and batch["planes"].shape == (120, 6144)
    assert not batch["flags"][40:80].any() and batch["flags"][:40].any()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shards_of_another_kind_and_feature_lists_are_comments(tmp_path: Path):
    testing.write_shards(tmp_path, {"number": np.arange(10)})
    (sequences,) = testing.write_shards(tmp_path / "lists", [sequence_example(b"steps\n")] * 3)
    sequences.rename(tmp_path / "00001.tfrecord")
    np.savez(tmp_path / "00002.npz", rows=np.zeros((4, 3)))
    (tmp_path / "00003.html").write_text("<!DOCTYPE html>\n<html>Sign in</html>\n")
    (tmp_path / "00004.tfrecord").touch()
    module = inspect(tmp_path / "0*", "--features").stdout
    said = said_in(module)
    assert "Feature lists of a tf.train.SequenceExample are not read: 'steps\\n'." in said
    assert "'00002.npz' is of another kind, or cannot be read: " in said
    assert "'00003.html' is of another kind, or cannot be read: " in said and "HTML" in said
    assert "00004" not in module
    assert "3 of 13 records lack it and get the default. They are in '00001.tfrecord'." in said
    names: dict[str, Any] = {}
    exec(compile(module, "proposed.py", "exec"), names)
    assert list(names["schema"].features) == ["number"]
    of_rows = inspect(tmp_path / "00002.npz", tmp_path / "00000.tfrecord", "--features")
    exec(compile(inspect(tmp_path / "0000[02]*", "--features").stdout, "proposed.py", "exec"), names)
    assert of_rows.returncode == 0, of_rows.stderr


def test_of_many_shards_a_little_of_each_is_looked_at(tmp_path: Path):
    many = 1500
    testing.write_shards(tmp_path, {"number": np.arange(many), "board": np.zeros((many, 8), bool)}, num_shards=many)
    last = tmp_path / f"{many - 1:05}.tfrecord"
    last.write_bytes(testing.write_shards(tmp_path / "last", {"number": np.arange(9)})[0].read_bytes())
    module = inspect(tmp_path / "*.tfrecord", "--features").stdout
    assert f"from {many + 2} records of {many} of {many} shards." in module
    assert f"3 of {many + 2} records lack it and get the default. They are in '{last.name}'." in said_in(module)


def test_what_cannot_be_shown_is_said(shard: Path, tmp_path: Path):
    (tmp_path / "scores.py").write_text(
        "import loaderd\nschema = loaderd.Schema({'score': loaderd.Float()}, {'score': loaderd.Array('score')})\n"
    )
    for arguments, said in [
        ([shard, "--record", 300], "The last healthy one is 299"),
        ([shard, "--schema", "loaderd.schemas:mnist"], "record 0: expected feature 'image_raw'"),
        ([shard, "--schema", "nowhere:schema"], "--schema nowhere:schema cannot be loaded"),
        ([shard, "--png", "x.png"], "--png needs --schema"),
        ([shard, "--schema", "scores:schema", "--png", "x.png"], "--png needs a field with planes"),
        ([shard, "--schema", "boards:schema", "--png", "no/x.png"], "--png no/x.png cannot be written"),
        ([tmp_path / "none"], "does not exist"),
    ]:
        done = inspect(*arguments, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [(), ("--features",), ("--schema", "lc0")])
def test_a_file_of_another_kind_is_named(option: tuple[str, ...], tmp_path: Path):
    (tmp_path / "a").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    done = inspect(str(tmp_path / "a"), *option)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a is a pointer of Git LFS" in done.stderr and "git lfs pull" in done.stderr
