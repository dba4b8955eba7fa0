"""The Python code of the README and of every page of docs/ runs, in order, on shards such as it names.

A page is a program of its own: names of a block are there for those behind it. A line in front of a block says what
it needs beside loaderd, ``<!-- needs torch -->``: it is run where that is installed. What a page's blocks take for
granted is made by ``<!-- before … -->``. A page that begins with ``<!-- run by tests/… -->`` is run there.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import loaderd
from loaderd.schemas import kata, leela

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in path.parts
}
_BLOCK = re.compile(r"(?:^<!-- needs (\w+) -->\n)?^```python\n(.*?)^```$|^<!-- before\n(.*?)^-->$", re.M | re.S)
_ELSEWHERE = re.compile(r"\A<!-- run by (\S+) -->\n")


class Block(NamedTuple):
    needs: str
    code: str


def blocks(text: str) -> list[Block]:
    return [Block(found[1] or "", found[2] or found[3]) for found in _BLOCK.finditer(text)]


def is_here(needed: str) -> bool:
    return not needed or importlib.util.find_spec(needed) is not None or shutil.which(needed) is not None


PROGRAMS = [name for name, text in PAGES.items() if not _ELSEWHERE.match(text) and blocks(text)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages read."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    chess = {"d": rng.integers(0, 256, (1200, 194), np.uint8), "s": rng.integers(-500, 500, 1200)}
    go = {
        "planes": rng.integers(0, 256, (200, 361), np.uint8),
        "policy": rng.random((200, 362)).astype("<f2"),
        "winner": rng.integers(0, 2, 200),
    }
    loaderd.testing.write_shards(folder / "shards", chess, num_shards=2)
    loaderd.testing.write_shards(folder / "go", go, num_shards=2)
    write_games(folder)
    return folder


def write_games(folder: Path) -> None:
    """A tar of one game of Leela Chess Zero, and a file of KataGo's rows; all but the versions is zeros."""
    for name in ("lc0", "katago"):
        (folder / name).mkdir()
    game = np.zeros(9, leela.RECORD_V6)
    game["version"], game["input_format"] = 6, 1
    packed = gzip.compress(game.tobytes())
    with tarfile.open(folder / "lc0" / "hour.tar", "w") as tar:
        member = tarfile.TarInfo("hour/game.gz")
        member.size = len(packed)
        tar.addfile(member, io.BytesIO(packed))
    rows = np.zeros(9, kata.rows())
    np.savez_compressed(folder / "katago" / "0.npz", **{name: rows[name] for name in rows.dtype.names})


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_code_runs(
    page: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    wanted = [block for block in blocks(PAGES[page]) if is_here(block.needs)]
    if not wanted:
        pytest.skip(f"{', '.join(sorted({block.needs for block in blocks(PAGES[page])}))} is not installed")
    for folder in shards.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    if any("MirroredStrategy()" in block.code for block in wanted):
        import tensorflow as tf

        strategy = request.getfixturevalue("mirrored")  # the one that a process can have
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    names: dict[str, Any] = {"__name__": page}
    for block in wanted:
        exec(compile(block.code, page, "exec"), names)
    check = CHECKS.get(page)
    if check is not None and all(is_here(block.needs) for block in blocks(PAGES[page])):
        check(names)


def test_code_that_needs_more_than_loaderd_says_so():
    """Of a page, what is run where nothing else is installed imports nothing else, and uses no name of the others."""
    pytest.importorskip("ruff")
    more = {block.needs for page in PROGRAMS for block in blocks(PAGES[page])} - {""}
    more |= {"keras", "loaderd_tf", *(f"loaderd_{needed}" for needed in more)}
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format=concise", "--select=F821", "-"]
    for page in PROGRAMS:
        alone = "\n".join(block.code for block in blocks(PAGES[page]) if not block.needs)
        imports = [node for node in ast.walk(ast.parse(alone)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
        assert not {module.split(".")[0] for module in modules} & more, page
        checked = subprocess.run(command, input=alone, capture_output=True, text=True)
        assert checked.returncode == 0, f"{page}: {checked.stdout}{checked.stderr}"


# ------------------------------------------------------- what the pages say of the values that their code comes to


def check_tf_data(names: dict[str, Any]) -> None:
    """The code that is replaced gives the same values; the commands work, and the module is the one they print."""
    page, printed = PAGES["docs/start/tf-data.md"], ""
    for line in re.findall(r"^loaderd (?!doctor).*", page, re.M):  # doctor takes its time, and has tests of its own
        command, environment = f"{Path(sys.executable).parent}/{line}", {**os.environ, "COLUMNS": "76"}
        printed += subprocess.run(
            command, shell=True, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
    (drawn,) = re.findall(r"^```text\n(planes: .*?)^```$", page, re.M | re.S)
    assert Path("records.py").read_text() in page and drawn in printed
    import tensorflow as tf

    scores = [np.sort(np.concatenate([score for _, score in names[which]])) for which in ("before", "after")]
    np.testing.assert_allclose(*scores, atol=1e-6)
    numbers = np.arange(24, dtype=np.float32)
    sums = [
        float(tf.add_n([tf.reduce_sum(board * numbers) for (board, _), _ in names[which]]))
        for which in ("before", "after")
    ]
    assert sums[0] == sums[1]
    assert len(names["after"]) == 3


def check_lc0(names: dict[str, Any]) -> None:
    assert names["batch"]["planes"].shape == (9, 112, 8, 8) and names["values"].shape == (9, 6, 3)
    specs = {**loaderd.schemas.lc0().specs, **loaderd.schemas.lc0(targets="all").specs}
    assert {name: f"{spec.shape}" for name, spec in specs.items()} == shapes_in("docs/start/lc0.md")
    made = np.frombuffer(gzip.decompress(Path("version-7/0.gz").read_bytes()), leela.RECORD)
    q = d = 0.0
    for n in range(39, -1, -1):  # V6ToV7 of lczero-training, csrc/loader/stages/chunk_rescorer.cc
        sign, weight = -1 if n % 2 else 1, 1 if n == 39 else 1 / 6
        q += weight * (sign * np.sin(n) - q)
        d += weight * (np.cos(n) - d)
        assert made["q_st"][n] == pytest.approx(sign * q, abs=1e-6)
        assert made["d_st"][n] == pytest.approx(max(d, 0), abs=1e-6)
        after = [number if number < 40 else 65535 for number in (n, n + 1, n + 2)]
        assert [made[name][n] for name in ("played_idx", "opp_played_idx", "next_played_idx")] == after


def check_katago(names: dict[str, Any]) -> None:
    assert names["weight"].shape == (600 % 256,) and names["planes"].shape == (600 % 256, 22, 19, 19)
    specs = loaderd.schemas.katago(q_values=True, metadata=True).specs
    assert {name: f"{spec.shape}" for name, spec in specs.items()} == shapes_in("docs/start/katago.md")
    assert names["window"].selection[-1].count == loaderd.PowerLaw(exponent=0.65, per_row=0.4, min_rows=250_000)


def shapes_in(page: str) -> dict[str, str]:
    """The shape of each field, in the table of a page."""
    rows = re.findall(r"^\| (`.*?) \| (\(.*?) \|", PAGES[page], flags=re.MULTILINE)
    return {
        name: shape
        for fields, text in rows
        for name, shape in itertools.zip_longest(
            re.findall(r"`(\w+)`", fields), re.findall(r"\(.*?\)", text), fillvalue=re.findall(r"\(.*?\)", text)[0]
        )
    }


def check_records(names: dict[str, Any]) -> None:
    board, policy, value = names["planes"], names["policy"], names["value"]
    assert board.shape == (200 % 64, 19, 19, 8) and board.dtype == "bfloat16"
    assert policy.shape == (200 % 64, 362) and set(value) == {-1.0, 1.0}
    assert set(names["stored"].fields) == {"d", "s"}


def check_augmentation(names: dict[str, Any]) -> None:
    board, (policy, value) = next(iter(names["turned"]))
    assert board.shape == (64, 19, 19, 8) and policy.shape == (64, 362) and len(set(value.numpy())) == 64


def check_resume(names: dict[str, Any]) -> None:
    import tensorflow as tf

    position = json.loads(json.loads(names["saved"])["position"])
    assert (position["epoch"], position["batch"], names["epoch"]) == (0, 5, 2), "what its comments say"
    saved = loaderd.Position.from_json(json.loads(names["state"].numpy())["position"])
    assert (saved.epoch, saved.batch) == (1, 2)
    (loop,) = (block.code for block in blocks(PAGES["docs/resume.md"]) if "CheckpointManager" in block.code)
    exec(compile(loop, "docs/resume.md", "exec"), names)
    assert int(names["net"].optimizer.iterations) == 9, "five steps, saved, and four more"
    assert tf.is_tensor(names["board"]) and names["board"].shape == (1200 - 2 * 512, 8, 8, 24)
    to_its_end = loop.replace("% 5", "% 3")  # so that the last step is saved, too
    for _ in range(2):
        exec(compile(to_its_end, "docs/resume.md", "exec"), names)
        assert int(names["net"].optimizer.iterations) == 9, "a finished training is not gone on with"


def check_datasets(names: dict[str, Any]) -> None:
    assert (names["there"].epoch, names["there"].batch) == (2, 6), "what its comment says"
    assert 1000 < names["num_trained"] < 1150, "nine tenths of 1,200"


def check_pytorch(names: dict[str, Any]) -> None:
    import torch

    def steps() -> set[int]:
        return {int(state["step"]) for state in names["optimizer"].state.values()}

    trained = {name: value.clone() for name, value in names["net"].state_dict().items()}
    assert steps() == {120}, "twice three epochs of 20 batches"
    assert '"epoch": 2, "batch": 15' in torch.load("checkpoint.pt", weights_only=True)["data"]["position"]
    (again,) = (block.code for block in blocks(PAGES["docs/frameworks/pytorch.md"]) if "checkpoint.pt" in block.code)
    exec(compile(again, "docs/frameworks/pytorch.md", "exec"), names)
    assert steps() == {120}, "it went on with the last five"
    for name, value in names["net"].state_dict().items():
        torch.testing.assert_close(value, trained[name])


def check_jax(names: dict[str, Any]) -> None:
    assert abs(names["weights"]).max() > 0
    assert b'"epoch": 1, "batch": 0' in bytes(names["state"]["position"])


def check_trainers(names: dict[str, Any]) -> None:
    """Each has trained for three epochs of three batches, and left a checkpoint to go on from."""
    import torch

    assert Path("lightning/last.ckpt").exists() and names["trainer"].state.global_step == 9
    assert (names["loader"].position.epoch, names["loader"].position.batch) == (3, 0)
    assert torch.load("lightning/last.ckpt", weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    state = torch.load("accelerate/custom_checkpoint_0.pkl", weights_only=True)["position"]
    assert (loaderd.Position.from_json(state).epoch, names["epoch"]) == (3, 2)
    assert sorted(path.name for path in Path("transformers").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-9"]


def check_others(names: dict[str, Any]) -> None:
    """Each loader gives what its file was made of."""

    def only(loader: str) -> Any:
        with names[loader]:
            (batch,) = names[loader]
        return batch

    shots, ataxx, variants = map(only, ("stim_loader", "ataxx_loader", "variants"))
    assert (shots["dets"] == names["events"]).all() and (shots["obs"] == names["flips"]).all()
    assert (only("fingerprints")["bits"] == names["molecules"]).all()
    assert (only("reads")["bases"].argmax(2) == names["bases"]).all()
    planes = np.stack([names["stones"] == which for which in range(3)], axis=1)
    assert (ataxx["planes"].reshape(400, 3, 49) == planes).all()
    assert (ataxx["score"] == np.arange(400)).all() and (ataxx["result"] == 1).all()
    assert (variants["image"].reshape(20, -1) == names["images"] / 128 - 1).all()
    assert (variants["label"] == names["labels"]).all()


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/start/tf-data.md": check_tf_data,
    "docs/frameworks/pytorch.md": check_pytorch,
    "docs/frameworks/jax.md": check_jax,
    "docs/start/lc0.md": check_lc0,
    "docs/start/katago.md": check_katago,
    "docs/start/others.md": check_others,
    "docs/records.md": check_records,
    "docs/augmentation.md": check_augmentation,
    "docs/resume.md": check_resume,
    "docs/trainers.md": check_trainers,
    "docs/datasets.md": check_datasets,
}


# ---------------------------------------------------------------------------------------- the pages themselves


def test_no_block_is_left_out():
    for name, text in PAGES.items():
        assert len(blocks(text)) == text.count("```python\n") + text.count("<!-- before\n"), name
    assert set(CHECKS) <= set(PROGRAMS)


def test_pages_that_are_run_elsewhere_are_run_there():
    for name, text in PAGES.items():
        if found := _ELSEWHERE.match(text):
            assert Path(name).name in (ROOT / found[1]).read_text(), f"{found[1]} does not speak of {name}"


def test_code_fits_beside_the_sidebar():
    wide = [
        f"{name}: {line}"
        for name, text in PAGES.items()
        for language, code in re.findall(r"^```([^\n`]*)\n(.*?)^```$", text, re.M | re.S)
        for line in code.splitlines()
        if len(line) > 76 and not language.startswith("{")
    ]
    assert not wide, "\n".join(wide)


def test_no_block_is_without_a_language():
    for name, text in PAGES.items():
        opening = re.findall(r"^```(.*)$", text, re.M)[::2]
        assert all(opening), f"{name}: what is output is `text`"


def test_no_paragraph_is_a_wall():
    for name, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$|^\|.*$|<!--.*?-->", "", text, flags=re.M | re.S)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
            assert len(paragraph.split()) <= 120, f"{name}: {paragraph[:80]}"


def test_columns_of_figures_are_right_aligned():
    for name, text in PAGES.items():
        for table in re.findall(r"(?:^\|.*\|\n){3,}", text, flags=re.M):
            _, aligned, *rows = [line.strip("|").split("|") for line in table.splitlines()]
            for which, align in enumerate(aligned):
                cells = [row[which].strip() for row in rows if len(row) > which and row[which].strip()]
                if all(re.fullmatch(r"\d[\d,.–() ×%]*", cell) for cell in cells):
                    assert not cells or align.endswith(":"), f"{name}: {cells[0]}"


def test_errors_on_the_page_are_those_that_are_raised():
    """Each text in the tables of failures.md stands in the source, but for what ``…`` stands for."""
    strings = [
        node.value
        for package in (ROOT / "loaderd", ROOT / "bindings")
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    source = "\n".join([*strings, *dir(loaderd.errors)])
    rows = re.findall(r"^\| (`.*?`) \|", PAGES["docs/failures.md"], flags=re.M)
    texts = [text for row in rows for text in re.findall(r"`([^`]*)`", row) if not text.startswith('"')]
    assert len(texts) > 25
    for part in (part.strip(" :,") for text in texts for part in text.split("…")):
        assert part in source, part
