"""The kernels that unpack bits."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """What unpacks bits: a test that uses this runs with both."""
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERD_KERNELS", request.param)
        yield request.param
