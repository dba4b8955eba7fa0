"""The benchmark's candidates for PyTorch and JAX deliver what loaderd does."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.interface import Config
from harness.run_candidate import run_candidate
from harness.synthetic import write_shards

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("options", ["", ":int8", ":packed"])
def test_the_candidate_delivers_what_loaderd_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, options: str
):
    pytest.importorskip(library, reason="it is not installed: make test-torch")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    paths = write_shards(tmp_path, 1000, num_shards=2)
    config = Config(tuple(map(str, paths)), batch_size=128, epochs=1, workers=1)
    own, others = (
        run_candidate(name + options, config, None, timeout_s=60)["digest"]
        for name in (f"loaderd_{library}_batches", "loaderd_python")
    )
    assert own == others
