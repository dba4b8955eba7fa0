"""Functions in the language of LLVM, compiled where llvmlite is to be had (``pip install 'loaderd[compiled]'``).

They are written with the vectors and the loops that they shall have, so that it does not matter what a compiler makes
of them. What they do, numpy does as well: nothing needs them. To import llvmlite takes 50 ms, and to compile what
workers run, together, 35; the process that workers are forks of does both. So nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from functools import cache
from typing import Any, NamedTuple

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64
"""Types of arguments: of an array's memory (``array.ctypes.data``), and of a signed number of 64 bits."""

_logger = logging.getLogger(__name__)


def can_compile() -> bool:
    """Whether llvmlite is there and works; it is then loaded. LOADERD_KERNELS=numpy forbids it."""
    return os.environ.get("LOADERD_KERNELS") != "numpy" and _llvm() is not None


class Loop(NamedTuple):
    """A function in the language of LLVM, the types of its arguments and of what it returns."""

    code: str
    name: str
    arguments: tuple[type, ...]
    result: type | None = None


def compiled(loop: Loop) -> Any:
    """``loop`` for this very processor, to be called; None where it cannot be compiled.

    It runs without the interpreter's lock, and checks nothing.
    """
    if not can_compile():
        return None
    if loop not in _functions:
        compile_together(loop)
    return _functions[loop]


def compile_together(*loops: Loop) -> None:
    """Have them compiled, as far as that is possible: several take little longer than one."""
    if not can_compile():
        return
    llvm = _llvm()
    try:
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly("".join(loop.code for loop in loops)), machine)
        engine.finalize_object()
    except Exception as error:
        if len(loops) > 1:  # one that cannot be compiled keeps no other from it
            for loop in loops:
                compile_together(loop)
            return
        _cannot_be_used(error)
        _functions.update(dict.fromkeys(loops))
        return
    for loop in loops:
        function: Any = ctypes.CFUNCTYPE(loop.result, *loop.arguments)(engine.get_function_address(loop.name))
        function.engine = engine  # the code lives as long as it
        _functions[loop] = function


_functions: dict[Loop, Any] = {}
"""What was compiled; None for what could not be."""


@cache
def _llvm() -> Any:
    """The compiler, loaded; None where there is none, or it does not work."""
    try:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # Where a process may not make code (systemd's MemoryDenyWriteExecute), LLVM would abort it.
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _cannot_be_used(error)
        return None
    return llvm


def _cannot_be_used(error: Exception) -> None:
    _logger.info("numpy does it, for llvmlite cannot be used: %s", error)
