"""The README's code runs, in order, on shards such as it names; its commands and options exist."""

from __future__ import annotations

import gzip
import inspect
import io
import itertools
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.schemas import kata, leela

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMAND = str(Path(sys.executable).with_name("loaderd"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def _shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    chess = {"d": rng.integers(0, 256, (1200, 194), np.uint8), "s": rng.integers(-500, 500, 1200)}
    go = {
        "planes": rng.integers(0, 256, (200, 361), np.uint8),
        "policy": rng.random((200, 362)).astype("<f2"),
        "winner": rng.integers(0, 2, 200),
    }
    loaderd.testing.write_shards(tmp_path / "shards", chess, num_shards=2)
    loaderd.testing.write_shards(tmp_path / "go", go, num_shards=2)
    write_games(tmp_path)
    monkeypatch.chdir(tmp_path)


def write_games(folder: Path) -> None:
    """A tar of one game of Leela Chess Zero, and a file of KataGo's rows; all but the versions is zeros."""
    for name in ("lc0", "katago"):
        (folder / name).mkdir()
    game = np.zeros(9, leela.RECORD)
    game["version"], game["input_format"] = 6, 1
    packed = gzip.compress(game.tobytes())
    with tarfile.open(folder / "lc0" / "hour.tar", "w") as tar:
        member = tarfile.TarInfo("hour/game.gz")
        member.size = len(packed)
        tar.addfile(member, io.BytesIO(packed))
    rows = np.zeros(9, kata.rows())
    np.savez_compressed(folder / "katago" / "0.npz", **{name: rows[name] for name in rows.dtype.names})


@pytest.fixture
def _server(_shards: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server that the README starts, of the module that it shows."""
    (module,) = (block for block in blocks("python") if block.startswith("# datasets.py\n"))
    (tmp_path / "datasets.py").write_text(module)
    (command,) = re.findall(r"^loaderd (serve [^#]*)", "\n".join(blocks("sh")), flags=re.MULTILINE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen([COMMAND, *command.split(), "--workers", "1"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("connect with" in line for line in server.stderr)
        yield
        server.terminate()
        assert "the server has ended" in server.communicate(timeout=30)[1].splitlines()[-1]


@pytest.mark.usefixtures("_server")
def test_the_code_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mirrored: Any):
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: mirrored)  # the one that a process can have
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if "import loaderd_torch" in block or "import loaderd_jax" in block:
            continue  # run by the tests of those bindings, where PyTorch and JAX are
        exec(compile(block, "README.md", "exec"), names)
    assert "Position(epoch=2, batch=0)" in capsys.readouterr().out
    here, there = names["here"], names["there"]
    assert (here.epoch, here.batch) == (1, 5) and (there.epoch, there.batch) == (2, 6), "what their comments say"
    with loaderd.Loader("shards/*.tfrecord", names["chess"], batch_size=100, epochs=3) as loader:
        eighteenth = next(itertools.islice(loader, 17, None))
        assert all(np.array_equal(names["following"][name], eighteenth[name]) for name in eighteenth)
    scores = [np.sort(np.concatenate([score for _, score in names[which]])) for which in ("before", "after")]
    np.testing.assert_allclose(*scores, atol=1e-6)
    sums = [
        float(tf.add_n([tf.reduce_sum(board * np.arange(24, dtype=np.float32)) for (board, _), _ in names[which]]))
        for which in ("before", "after")
    ]
    assert sums[0] == sums[1], "the code that is replaced gives the same planes"
    assert len(names["after"]) == 3
    with names["leela_games"], names["katago_moves"]:
        assert next(iter(names["leela_games"]))["planes"].shape == (9, 112, 8, 8)
        assert next(iter(names["katago_moves"]))["planes"].shape == (9, 22, 19, 19)
    board, (policy, value) = next(iter(names["go"]))
    assert board.shape == (64, 19, 19, 8) and board.dtype == tf.bfloat16
    assert policy.shape == (64, 362) and set(value.numpy()) == {-1.0, 1.0}
    assert set(names["stored"].fields) == {"d", "s"}
    saved = loaderd.Position.from_json(names["position"].numpy())
    assert (saved.epoch, saved.batch) == (1, 2)
    (loop,) = (block for block in blocks("python") if "CheckpointManager" in block)
    exec(compile(loop, "README.md", "exec"), names)
    assert names["start"] == saved and int(names["net"].optimizer.iterations) == 9, "five steps, saved, and four more"
    assert tf.is_tensor(names["board"]) and names["board"].shape == (1200 - 2 * 512, 8, 8, 24)
    assert sum(len(score) for _, score in names["train_batches"]) in range(1500, 1800), "a half of three epochs"
    assert "train" in subprocess.run([COMMAND, "status"], capture_output=True, text=True, timeout=60).stdout


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_every_option_has_its_row():
    rows = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    options = set(inspect.signature(loaderd.Loader.__init__).parameters) - {"self", "schema"}
    binding = set(inspect.signature(loaderd_tf.make_dataset).parameters) - {"schema", "options"}
    assert rows == options | binding | {each.name for each in fields(loaderd.Storage)}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
