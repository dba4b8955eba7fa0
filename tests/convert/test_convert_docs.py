"""The code and the commands of docs/convert.md run, in order, in one folder."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.schemas import leela

DOCS = Path(__file__).parents[2] / "docs" / "convert.md"


def test_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shogi", raising=False)
    games = np.zeros(9, leela.RECORD_V6)
    games["version"], games["input_format"] = 6, 1
    game = tmp_path / "game.gz"
    game.write_bytes(gzip.compress(games.tobytes()))
    (tmp_path / "games").mkdir()
    with tarfile.open(tmp_path / "games" / "hour.tar", "w") as tar:
        tar.add(game, "hour/game.gz")
    statuses, names = [], dict[str, Any]()
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```$", DOCS.read_text(), flags=re.M | re.S):
        if language == "python":
            exec(compile(block, str(DOCS), "exec"), names)
            continue
        search = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        statuses.append(subprocess.run(block, shell=True, env=search, capture_output=True, timeout=60).returncode)
    assert statuses == [0, 0, 0]
