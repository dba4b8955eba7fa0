"""Loops in the language of LLVM, compiled where llvmlite is installed (the extra ``compiled``).

Their text says which vectors and loops to use, so that their speed does not depend on what a compiler finds out.
They are optional: beside each of them stands what does the same by numpy. This module alone decides which of the two
is used. Importing llvmlite takes 50 ms, and compiling all that workers run takes 30 ms. The fork server does both, so
workers have the result, and nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

_logger = logging.getLogger("loaderd")

_TYPES: dict[str, Any] = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "void": None}
_SIGNATURE = re.compile(r"define (i64|void) @(\w+)\(([^)]*)\)")
_functions: dict[str, Any] = {}
"""What was compiled, by its text; None for what could not be."""


def can_compile() -> bool:
    """Whether llvmlite is installed and works; if so, it is loaded now. ``LOADERD_KERNELS=numpy`` forbids it."""
    return os.environ.get("LOADERD_KERNELS") != "numpy" and _llvm() is not None


def compiled(code: str) -> Any:
    """The function that ``code`` defines, compiled for this processor; None where it cannot be: then use numpy.

    Its arguments are addresses of arrays (``array.ctypes.data``) and numbers of 64 bits. It runs without the
    interpreter's lock, and does not check its arguments.
    """
    if not can_compile():
        return None
    if code not in _functions:
        compile_together(code)
    return _functions[code]


def compile_together(*codes: str) -> None:
    """Compile functions, as far as that is possible: several together take little longer than one."""
    if not can_compile():
        return
    llvm = _llvm()
    try:
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_module_of(codes)), machine)
        engine.finalize_object()
    except Exception as error:
        _cannot_be_used(error)
        _functions.update(dict.fromkeys(codes))
        return
    for code in codes:
        signature = _SIGNATURE.search(code)
        assert signature is not None
        result, name, arguments = signature.groups()
        types = [_TYPES[argument.split()[0]] for argument in arguments.split(",")]
        function: Any = ctypes.CFUNCTYPE(_TYPES[result], *types)(engine.get_function_address(name))
        function.engine = engine  # the code lives as long as its engine
        _functions[code] = function


def _module_of(codes: Sequence[str]) -> str:
    """The text of all functions. What several of them declare, a module may declare but once."""
    lines = [line for code in codes for line in code.splitlines()]
    declared = dict.fromkeys(line for line in lines if line.startswith("declare "))
    return "\n".join([*declared, *(line for line in lines if line not in declared)])


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


def each_record(start: str, body: str) -> str:
    """The code of a loop over records. It returns the number of the first one that is damaged, or -1.

    ``start`` is the function's head, which has ``%num_records``, and what comes before the first record. ``body`` has
    the ``%number`` of a record, and goes on at ``%done``, or at ``%bad`` if the record is damaged.
    """
    return f"""{start}
  %any = icmp sgt i64 %num_records, 0
  br i1 %any, label %record, label %good

record:
  %number = phi i64 [0, %start], [%next_number, %done]
{body}

done:
  %next_number = add i64 %number, 1
  %are_records = icmp ult i64 %next_number, %num_records
  br i1 %are_records, label %record, label %good

bad:
  ret i64 %number

good:
  ret i64 -1
}}
"""


BITSWAP = """
declare i64 @llvm.bswap.i64(i64)
declare i64 @llvm.bitreverse.i64(i64)
"""


def word_of_bits(block: str, byte: str) -> str:
    """The code that loads 64 bits from ``byte`` of ``%row`` on, without the first ``%shift``, as ``%shifted``.

    The first of them is the lowest; ``%reverses``: it is the highest of its byte. The code is in ``block`` where it
    begins and in ``%in_order`` where it ends, and needs what ``BITSWAP`` declares.
    """
    return f"""
  %word_ptr = getelementptr i8, ptr %row, i64 {byte}
  %as_stored = load i64, ptr %word_ptr, align 1
  br i1 %reverses, label %reverse, label %in_order

reverse:
  %swapped = call i64 @llvm.bswap.i64(i64 %as_stored)
  %reversed = call i64 @llvm.bitreverse.i64(i64 %swapped)
  br label %in_order

in_order:
  %ordered = phi i64 [%as_stored, %{block}], [%reversed, %reverse]
  %shifted = lshr i64 %ordered, %shift"""
