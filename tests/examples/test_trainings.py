"""The examples of Leela's files, of KataGo's and of digits: each is played or written, and trained on, small."""

from __future__ import annotations

import gzip
import re
import tarfile
from pathlib import Path
from typing import Any

import make_npz
import numpy as np
import pytest
import self_play

from loaderd.schemas.leela import RECORD_V6

Start = Any  # of conftest.py: start("go/train.py", *arguments)


def assert_model_and_curve(run: Path) -> None:
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "model.keras").stat().st_size > 0


# ------------------------------------------------------------------------------------------------------ lc0


@pytest.mark.slow  # lc0 plays for 20 s; tests/convert reads such games too
def test_lc0_plays_and_a_net_learns_of_it(start: Start, tmp_path: Path) -> None:
    games, run = tmp_path / "games", tmp_path / "run"
    with start("lc0/make_tars.py", "--out", games, "--games", 12, "--visits", 8) as playing:
        playing.end()
    assert sorted(path.name for path in games.iterdir()) == ["train-000.tar", "validation-000.tar"]
    with tarfile.open(games / "train-000.tar") as tar:
        files = [tar.extractfile(member) for member in tar]
        records = sum(len(gzip.decompress(file.read())) // RECORD_V6.itemsize for file in files if file is not None)
    size = ["--batch-size", 64, "--epochs", 1, "--filters", 8, "--blocks", 1]
    with start("lc0/train.py", "--data", games, "--out", run, *size) as training:
        printed = training.end()
    assert f"{records // 64} steps an epoch" in printed
    before, after = map(float, re.findall(r"^(?:before|after): +loss of the policy ([\d.]+)", printed, re.M))
    assert after < before
    assert_model_and_curve(run)

    with start("lc0/make_tars.py", "--out", games) as again:
        assert "holds tars already (train-000.tar, …)" in again.end(status=1)


# ------------------------------------------------------------------------------------------------------- Go


def board(*rows: str) -> list[int]:
    return [".XO".index(point) for row in rows for point in row]


def test_what_has_no_liberties_is_taken_and_a_ko_is_known() -> None:
    colors = board(".XO.", "XO.O", ".XO.", "....")
    assert self_play.play_move(colors, 4, self_play.BLACK, 6) == 5
    assert colors == board(".XO.", "X.XO", ".XO.", "....")
    colors = board("OO..", "XX..", "....", "....")
    assert self_play.play_move(colors, 4, self_play.BLACK, 2) == -1, "two stones are no ko"
    assert colors == board("..X.", "XX..", "....", "....")


def test_rows_say_what_the_game_was() -> None:
    game = self_play.play("0", 5)
    found = make_npz.rows_of(game, 5)
    planes = np.unpackbits(found["binaryInputNCHWPacked"], axis=2)[:, :, :25]
    for number, (row, turn) in enumerate(zip(found, game.turns, strict=True)):
        colors = np.array(turn.colors)
        sign = 1 if turn.player == self_play.BLACK else -1
        assert (planes[number, 1] == (colors == turn.player)).all()
        assert (planes[number, 2] == (colors == 3 - turn.player)).all()
        assert row["policyTargetsNCMove"][0, turn.move] > 0
        assert (row["policyTargetsNCMove"][0, :25][colors > 0] == 0).all()
        if number:
            before = game.turns[number - 1].move
            assert (np.flatnonzero(planes[number, 9]).tolist() or [25]) == [before]
            assert row["globalInputNC"][0] == (before == 25)
        assert row["globalTargetsNC"][20] == sign * game.score and row["globalTargetsNC"][0] == (
            sign * game.score > 0
        )
        assert np.flatnonzero(row["scoreDistrN"]) - (25 + 60) + 0.5 == sign * game.score
        assert row["valueTargetsNCHW"][0].sum() - sign * self_play.KOMI == sign * game.score


@pytest.mark.slow
def test_go_is_played_and_a_net_learns_of_it(start: Start, tmp_path: Path) -> None:
    games, run = tmp_path / "games", tmp_path / "run"
    with start(
        "go/make_npz.py", "--out", games, "--games", 30, "--size", 5, "--rows", 500, "--processes", 1
    ) as playing:
        playing.end()
    with start("go/train.py", "--data", games, "--out", run, "--size", 5, "--batch-size", 32) as training:
        printed = training.end()
    before, after = map(float, re.findall(r"^validation (?:before|after): +policy ([\d.]+)", printed, re.M))
    assert after < before
    assert_model_and_curve(run)


# --------------------------------------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def digits(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn", reason="its digits are the example's pictures")
    folder = tmp_path_factory.mktemp("digits")
    with start("mnist/make_shards.py", "--out", folder, "--shards", 1) as writing:
        assert "train: 1,497 pictures" in writing.end()
    return folder


def losses(start: Start, digits: Path, run: Path, *options: Any) -> list[float]:
    with start("mnist/train.py", "--data", digits, "--out", run, "--log-every", 1, *options) as training:
        printed = training.end()
    found = re.findall(r"^\S+ \S+: step (\d+), loss = (\S+) \(\S+ examples/sec; \S+ sec/batch\)$", printed, re.M)
    assert [int(step) for step, _ in found] == [*range(len(found))]
    return [float(loss) for _, loss in found]


@pytest.mark.slow
def test_two_towers_learn_what_one_learns_of_batches_twice_as_large(
    start: Start, digits: Path, tmp_path: Path
) -> None:
    together = losses(start, digits, tmp_path / "two", "--towers", 2, "--batch-size", 32, "--steps", 15)
    alone = losses(start, digits, tmp_path / "one", "--towers", 1, "--batch-size", 64, "--steps", 15)
    assert len(together) == 15 and together[-1] < together[0] - 0.3
    assert together == pytest.approx(alone, abs=0.02)
    assert len([*(tmp_path / "two" / "logs" / "loaderd").glob("events.out.tfevents.*")]) == 1
    assert_model_and_curve(tmp_path / "two")
