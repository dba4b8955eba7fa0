"""Tries an installed loaderd, without TensorFlow, from a folder that is no checkout: see package.sh."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

import loaderd


def try_it(folder: Path) -> None:
    """Shards written, verified by the command, and read by a loader; every module there, and importable."""
    command = Path(sys.executable).with_name("loaderd")
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    assert said == f"loaderd {version('loaderd')}\n", said
    home = Path(loaderd.__file__).parent
    assert Path(sys.prefix) in home.parents and (home / "py.typed").exists(), home
    for module in pkgutil.walk_packages([str(home)], "loaderd."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("prometheus_client", "uvicorn"), error  # of the extras metrics and server
    for binding in ("loaderd_jax", "loaderd_ray", "loaderd_tf", "loaderd_torch"):
        assert (home.parent / binding / "py.typed").exists(), binding
    arrays = {"planes": np.random.default_rng(0).random((1000, 8, 8)) < 0.5, "number": np.arange(1000)}
    paths = loaderd.testing.write_shards(folder / "shards", arrays, num_shards=3)
    subprocess.run([command, "verify", *paths], check=True, stdout=subprocess.DEVNULL)
    top = subprocess.run([command, "top", "--once"], capture_output=True, text=True)
    assert (top.returncode, top.stderr) == (1, "loaderd top needs rich: pip install 'rich>=13'\n"), top
    with loaderd.Loader(paths, loaderd.testing.schema_of(arrays), batch_size=100, index_cache="none") as loader:
        batches = [(batch["number"].copy(), batch["planes"].copy()) for batch in loader]
    numbers = np.concatenate([number for number, _ in batches])
    assert len(numbers) == 1000 == len(set(numbers.tolist()))
    assert all(np.array_equal(planes, arrays["planes"][number]) for number, planes in batches)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try_it(Path(name))
