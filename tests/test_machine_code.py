"""What is compiled runs; what is not, is None, and costs nothing else."""

from __future__ import annotations

import pytest

from loaderd.machine_code import NUMBER, compiled

_TWICE = "define i64 @twice(i64 %n) {\n  %sum = add i64 %n, %n\n  ret i64 %sum\n}\n"


def test_a_function_is_compiled_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.delenv("LOADERD_KERNELS", raising=False)
    assert compiled(_TWICE, "twice", (NUMBER,), NUMBER)(21) == 42
    assert compiled("this is no code", "twice", (NUMBER,), NUMBER) is None
    monkeypatch.setenv("LOADERD_KERNELS", "numpy")
    assert compiled(_TWICE, "twice", (NUMBER,), NUMBER) is None
