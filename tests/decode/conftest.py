"""Puts this folder on the path, for its helper modules: ``--import-mode=importlib`` does not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """What unpacks bits: a test that uses this runs with both."""
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERD_KERNELS", request.param)
        yield request.param
