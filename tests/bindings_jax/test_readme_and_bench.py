"""What the README shows of JAX runs, and the benchmark's candidate delivers what loaderd does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loaderd.bench.interface import Config
from loaderd.bench.run_candidate import run_candidate
from loaderd.bench.synthetic import write_shards

pytest.importorskip("jax", reason="JAX is not installed: make test-torch")

ROOT = Path(__file__).parent.parent.parent


def test_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "import loaderd_jax" in block)
    write_shards(tmp_path / "shards", 1200, num_shards=2)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert abs(names["weights"]).max() > 0
    assert '"epoch": 1, "batch": 0' in names["state"]["position"]


@pytest.mark.parametrize("options", ["", ":int8", ":packed"])
def test_the_candidate_delivers_what_loaderd_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str):
    paths = write_shards(tmp_path, 1000, num_shards=2)
    config = Config(tuple(map(str, paths)), batch_size=128, epochs=1, workers=1)
    own, others = (
        run_candidate(name + options, config, None, timeout_s=60)["digest"]
        for name in ("loaderd_jax_batches", "loaderd_python")
    )
    assert own == others
