"""The code of docs/ray.md runs on a cluster of this machine."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bindings_ray.ray_cluster import MODULE, SIZES

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

import loaderd_ray

ROOT = Path(__file__).parents[2]


def test_the_code_runs(cluster, datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = datasets / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(MODULE.replace(".parent", ".parent.parent", 1))
    monkeypatch.syspath_prepend(str(datasets))
    names: dict[str, Any] = {"dataset": importlib.import_module("mypackage.datasets").train}
    text = (ROOT / "docs" / "ray.md").read_text()
    text = text.replace("/shared/index", str(tmp_path)).replace("/shards/*", f"{datasets}/shards/*")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "ray.md", "exec"), names)
    assert sum(len(batch["id"]) for batch in [names["batch"]]) == sum(SIZES) % 512
    assert callable(names["train"]) and names["found"].damages == ()
    assert any(tmp_path.iterdir()), "the indexes are kept there"
    with pytest.raises(loaderd_ray.loaders.ServerError):
        loaderd_ray.connect("chess", batch_size=512, reconnect_timeout=1)
