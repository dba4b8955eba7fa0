"""The benchmark's candidate for PyTorch delivers what loaderd does."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.interface import Config
from harness.run_candidate import run_candidate
from harness.synthetic import write_shards

pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("options", ["", ":int8", ":packed"])
def test_the_candidate_delivers_what_loaderd_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    paths = write_shards(tmp_path, 1000, num_shards=2)
    config = Config(tuple(map(str, paths)), batch_size=128, epochs=1, workers=1)
    own, others = (
        run_candidate(name + options, config, None, timeout_s=60)["digest"]
        for name in ("loaderd_torch_batches", "loaderd_python")
    )
    assert own == others
