"""What the fork server compiles for its workers, and what it says of it."""

from __future__ import annotations

import pytest

from loaderd.worker.compiling import compile_loops


@pytest.mark.parametrize("kernels", ["", "numpy", "compiled", "nunpy"])
def test_kernels_that_there_are_not_are_warned_of(
    kernels: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOADERD_KERNELS", kernels)
    compile_loops()
    warned = ['LOADERD_KERNELS must be "numpy" or "compiled", got \'nunpy\': it is ignored']
    assert caplog.messages == (warned if kernels == "nunpy" else [])
