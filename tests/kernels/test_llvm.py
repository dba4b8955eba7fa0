"""What is compiled runs; what is not, is None, and costs nothing else."""

from __future__ import annotations

import pytest

from loaderd.kernels.llvm import compile_together, compiled

_CODE = "define i64 @name(i64 %n) {\n  %result = operation i64 %n, %n\n  ret i64 %result\n}\n"


_TWICE, _SQUARE, _BROKEN = (
    _CODE.replace("name", name).replace("operation", operation)
    for name, operation in (("twice", "add"), ("square", "mul"), ("broken", "what"))
)


def test_a_function_is_compiled_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.delenv("LOADERD_KERNELS", raising=False)
    compile_together(_TWICE, _SQUARE)
    compile_together(_BROKEN)
    assert compiled(_TWICE)(21) == 42 and compiled(_SQUARE)(7) == 49
    assert compiled(_BROKEN) is None
    monkeypatch.setenv("LOADERD_KERNELS", "numpy")
    assert compiled(_TWICE) is None
