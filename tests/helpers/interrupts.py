"""Ctrl-C at each point of a function at which Python looks for signals."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from loaderd.client import transport

_CLIENT = str(Path(transport.__file__).parent)
# Calls in Python 3.10; from 3.11 on; from 3.13 on; and where a function begins, from 3.11 on.
_LOOKS = {"CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "CALL_FUNCTION_EX", "CALL", "CALL_KW", "RESUME"}


def points_of(*functions: Callable[..., Any]) -> list[tuple[CodeType, int]]:
    """Where Python looks for signals: behind a call, and where a function begins."""
    return [
        (function.__code__, behind.offset)
        for function in functions
        for before, behind in pairwise(dis.get_instructions(function))
        if before.opname in _LOOKS
    ]


class InterruptAt:
    """KeyboardInterrupt the first time that a point is come to, in the with block."""

    def __init__(self, code: CodeType, offset: int) -> None:
        self._code, self._offset = code, offset
        self.came = False

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not self._code:
            return self._trace if frame.f_code.co_filename.startswith(_CLIENT) else None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == self._offset and not self.came:
            self.came = True
            raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> bool:
        sys.settrace(None)
        return exception[0] is KeyboardInterrupt
