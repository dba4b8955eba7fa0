"""A compiled function of a :class:`~loaderd.Derived` field: one of a shared library, or of numba."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.functions import same_function


@dataclass(frozen=True, eq=False)
class CFunction:
    """A C function for :class:`Derived`: ``CFunction("libcodes.so", "decode")``, or ``CFunction(decode)`` of numba.

    It makes many records in one call, and runs without Python and without the interpreter's lock::

        int64_t decode(const uint8_t *board, const int32_t *length, float *out, int64_t num_records)

    It gets a pointer to each of the ``inputs``, in their order, one to the output, and the number of records. Each
    points to a C-contiguous array of the field's dtype, ``(num_records, *shape)``. The function writes all of the
    output, and nothing else. It returns 0; or n, from 1 on, where record n of these cannot be made: that is a
    WorkerError, which names the record. A record at which it crashes is found and named as any other that ends a
    worker.

    ``library``: a path, from which each worker loads ``symbol``; a name without a slash is looked for as the system
    does, where there is no such file. Or a function that numba's ``@cfunc`` made, with this signature, which is
    ``"int64(CPointer(uint8), CPointer(int32), CPointer(float32), int64)"`` there: its Python function goes to the
    workers, and each compiles it for the dtypes of the fields, in half a second or more.
    """

    library: Any
    symbol: str | None = None

    def __post_init__(self) -> None:
        """Raises SchemaError where the library cannot be loaded, or lacks the function."""
        python = getattr(self.library, "__wrapped__", None)
        if isinstance(python, FunctionType) and hasattr(self.library, "address") and self.symbol is None:
            object.__setattr__(self, "library", python)
            return
        if not isinstance(self.library, (str, os.PathLike)) or not isinstance(self.symbol, str):
            raise SchemaError(
                "CFunction must get the path of a library and the name of a function in it, or a function of numba's "
                f"cfunc, got {self.library!r:.200} and {self.symbol!r:.200}"
            )
        path = os.fspath(self.library)
        object.__setattr__(self, "library", os.path.abspath(path) if os.path.exists(path) else path)
        self._symbol()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CFunction) or self.symbol != other.symbol:
            return NotImplemented if not isinstance(other, CFunction) else False
        if isinstance(self.library, FunctionType):
            return same_function(self.library, other.library)
        return bool(self.library == other.library)

    def __hash__(self) -> int:
        return hash(self.symbol)

    def _symbol(self) -> Any:
        assert self.symbol is not None
        try:
            return getattr(ctypes.CDLL(self.library), self.symbol)
        except (OSError, AttributeError) as error:
            raise SchemaError(
                f"CFunction: {self.symbol!r} of {self.library!r} cannot be loaded: {error}",
                hint="Each host that makes batches needs the library at this path.",
            ) from None

    def load(self, inputs: Sequence[np.dtype[Any]], output: np.dtype[Any]) -> Any:
        """The function, to be called with addresses and a number. Raises SchemaError where it cannot be compiled."""
        pointers = [ctypes.c_void_p] * (len(inputs) + 1)
        if not isinstance(self.library, FunctionType):
            function: Any = self._symbol()
            function.argtypes, function.restype = [*pointers, ctypes.c_int64], ctypes.c_int64
            return function
        try:
            import numba

            types = [numba.types.CPointer(numba.from_dtype(dtype)) for dtype in (*inputs, output)]
            made = numba.cfunc(numba.types.int64(*types, numba.types.int64))(self.library)
        except Exception as error:  # numba has many
            raise SchemaError(f"CFunction: numba cannot compile {self.library!r}: {error}") from None
        function = ctypes.CFUNCTYPE(ctypes.c_int64, *pointers, ctypes.c_int64)(made.address)
        function.made = made  # the code lives as long as this
        return function
