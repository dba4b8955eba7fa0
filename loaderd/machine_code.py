"""Functions in the language of LLVM, compiled where llvmlite is installed (``pip install 'loaderd[compiled]'``).

Their code says which vectors and loops to use, so that their speed does not depend on what a compiler finds out.
They are optional: numpy can do all that they do. Importing llvmlite takes 50 ms, and compiling all that workers run
takes 35 ms. The fork server does both, so workers have the result, and nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from functools import cache
from typing import Any, NamedTuple

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64
"""Types of arguments: the address of an array (``array.ctypes.data``), and a signed number of 64 bits."""

_logger = logging.getLogger("loaderd")


def can_compile() -> bool:
    """Whether llvmlite is installed and works; if so, it is loaded now. ``LOADERD_KERNELS=numpy`` forbids it."""
    return os.environ.get("LOADERD_KERNELS") != "numpy" and _llvm() is not None


class Loop(NamedTuple):
    """A function in the language of LLVM, the types of its arguments and of what it returns."""

    code: str
    name: str
    arguments: tuple[type, ...]
    result: type | None = None


def compiled(loop: Loop) -> Any:
    """``loop`` compiled for this processor, as a function to call; None where it cannot be compiled.

    The function runs without the interpreter's lock, and does not check its arguments.
    """
    if not can_compile():
        return None
    if loop not in _functions:
        compile_together(loop)
    return _functions[loop]


def compile_together(*loops: Loop) -> None:
    """Compile ``loops``, as far as that is possible: several together take little longer than one."""
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
        if len(loops) > 1:  # if one cannot be compiled, the others may be
            for loop in loops:
                compile_together(loop)
            return
        _cannot_be_used(error)
        _functions.update(dict.fromkeys(loops))
        return
    for loop in loops:
        function: Any = ctypes.CFUNCTYPE(loop.result, *loop.arguments)(engine.get_function_address(loop.name))
        function.engine = engine  # the code lives as long as its engine
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
        # Raises where a process may not make code (systemd's MemoryDenyWriteExecute): LLVM would abort the process.
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _cannot_be_used(error)
        return None
    return llvm


def _cannot_be_used(error: Exception) -> None:
    _logger.info("llvmlite cannot be used, so numpy is used instead: %s", error)
