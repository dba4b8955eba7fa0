"""Functions in the language of LLVM, compiled where llvmlite is to be had (``pip install 'loaderd[compiled]'``).

They are written with the vectors and the loops that they shall have, so that it does not matter what a compiler makes
of them. What they do, numpy does as well: nothing needs them. To import llvmlite takes 50 ms, and to compile a
function 5 to 10; the process that workers are forks of does both. So nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from functools import cache
from typing import Any

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64
"""Types of arguments: of an array's memory (``array.ctypes.data``), and of a signed number of 64 bits."""

_logger = logging.getLogger(__name__)


def can_compile() -> bool:
    """Whether llvmlite is there and works; it is then loaded. LOADERD_KERNELS=numpy forbids it."""
    return os.environ.get("LOADERD_KERNELS") != "numpy" and _llvm_works()


@cache
def _llvm_works() -> bool:
    try:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # Where a process may not make code (systemd's MemoryDenyWriteExecute), LLVM would abort it.
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
        _compiled("define void @nothing() {\n  ret void\n}\n", "nothing", (), None)
    except ModuleNotFoundError:
        return False
    except Exception as error:
        _logger.info("numpy does all of it, for llvmlite cannot be used: %s", error)
        return False
    return True


def compiled(code: str, name: str, arguments: tuple[type, ...], result: type | None = None) -> Any:
    """The function ``name`` of ``code``, for this very processor; None where nothing can be compiled.

    It runs without the interpreter's lock, and checks nothing.
    """
    return _compiled(code, name, arguments, result) if can_compile() else None


@cache
def _compiled(code: str, name: str, arguments: tuple[type, ...], result: type | None) -> Any:
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
    engine.finalize_object()
    function: Any = ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))
    function.engine = engine  # the code lives as long as it
    return function
