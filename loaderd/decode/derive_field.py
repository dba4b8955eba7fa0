"""Calls the user's function for a :class:`Derived` field, and checks what it returns."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.randomness import RecordRandom
from loaderd.schema import CFunction, Derived, Schema
from loaderd.schema.exact import ExactCast, is_cast, is_shaped, text_of
from loaderd.schema.representable import integer_limits


class DeriveField(Engine):
    """The engine of a derived field, or of such a part of a field."""

    writes_apart = True

    def __init__(
        self, what: str, definition: Derived, stream: str, schema: Schema, fields: Mapping[str, AnyArray]
    ) -> None:
        """``what``: its name in errors. ``fields``: where its inputs are when it is called, by name, (n, …) each.

        ``stream``: the name of the random stream, unless ``definition`` has another one.
        """
        self._what = what
        assert not isinstance(definition.function, CFunction)
        self._function = definition.function
        self._inputs = tuple(definition.inputs)
        self._fields = fields
        self._record_keys = schema.record_keys
        self._stream = stream if definition.random is True else definition.random or None

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Write function(*inputs) to ``out``, (n, *shape). Raises WorkerError, naming the field."""
        # Read-only, because an input may be another field of the batch.
        inputs: list[Any] = [_read_only(self._fields[name]) for name in self._inputs]
        if self._stream is not None:
            inputs.append(RecordRandom(self._record_keys(rows), self._stream))
        try:
            result = np.asarray(self._function(*inputs))
            problem = put_result(result, out)
        except BaseException as error:  # SystemExit, too: else the worker ends, and does not say at which field
            raise WorkerError(
                f"derived {self._what}: its function raised {type(error).__name__}: {_text_of(error)}, "
                f"where it must return {_expected(out)}",
                hint=self._called_with(inputs),
                traceback=traceback.format_exc(),
            ) from error
        if problem:
            expected, returned, remedy = problem
            raise WorkerError(
                f"derived {self._what}: expected {expected}, but its function returned {returned}",
                hint=f"{remedy}{self._called_with(inputs)}",
            )

    def _called_with(self, inputs: Sequence[Any]) -> str:
        given = ", ".join(
            f"{name}: {array.dtype} {array.shape}" for name, array in zip(self._inputs, inputs, strict=False)
        )
        random = "" if self._stream is None else " and a RecordRandom"
        return f"It was called with read-only arrays ({given}){random}; the first dimension is any number of records."


class CallCFunction(Engine):
    """The engine of a field that a :class:`~loaderd.CFunction` makes."""

    def __init__(self, what: str, definition: Derived, schema: Schema, fields: Mapping[str, AnyArray]) -> None:
        """``what``, ``fields``: as of :class:`DeriveField`. Raises SchemaError if the function is not there."""
        assert isinstance(definition.function, CFunction)
        self._what = what
        self._inputs = tuple(definition.inputs)
        self._fields = fields
        self._function = definition.function.load(
            [schema.spec_of(name).dtype for name in self._inputs], definition.dtype
        )

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Let the function write to ``out``. Raises WorkerError where it returns anything but 0."""
        inputs = [self._fields[name] for name in self._inputs]
        assert all(array.flags.c_contiguous for array in (*inputs, out))  # whose memory the function takes
        returned = self._function(*(array.ctypes.data for array in (*inputs, out)), len(rows))
        if returned:
            raise WorkerError(
                f"derived {self._what}: expected 0 of its C function, but it returned {returned}, called with "
                f"{len(rows)} records",
                hint="It returns the number of the first record that it cannot make, counted from 1.",
            )


def put_result(result: AnyArray, out: AnyArray) -> tuple[str, str, str] | None:
    """Write ``result`` to ``out``; where it does not fit: what is expected, what it is, and the remedy."""
    if result.shape != out.shape:
        if result.shape[:1] != out.shape[:1] or not is_shaped(result.shape[1:], out.shape[1:]):
            is_of_records = result.shape[:1] == out.shape[:1]
            remedy = f"If that is right, give the field shape={result.shape[1:]}. " if is_of_records else ""
            return _expected(out), f"{result.dtype} of shape {result.shape}", remedy
        result = result.reshape(out.shape)
    if result.dtype == out.dtype or (result.dtype.kind in "biuf" and out.dtype.kind in "bf"):
        out[...] = result
        return None
    if result.dtype.hasobject:
        out[...] = result  # raises where an object is no such value
        is_exact = out.dtype.kind in "SU" or (out.dtype.kind != "b" and integer_limits(out.dtype) is not None)
        is_lost = (out != result) & is_exact
        return (f"values that {out.dtype} holds", text_of(result[is_lost][0]), _REMEDY) if is_lost.any() else None
    if not is_cast(result.dtype, out.dtype) and not {result.dtype.kind, out.dtype.kind} <= {"S", "U"}:
        return _expected(out), f"{result.dtype} of shape {result.shape}", ""
    exact = ExactCast(result.dtype, out.dtype)
    if value := exact.find_lost(result):
        return exact.expected, value, _REMEDY
    out[...] = result
    return None


_REMEDY = "Give the field a dtype that holds it, or none, for the function's own; or cast it in the function. "


def _expected(out: AnyArray) -> str:
    return f"an array that can be cast to {out.dtype}, of shape {out.shape}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # it may be of a class of the user's
        return f"(its text raises {type(another).__name__})"


def _read_only(array: AnyArray) -> AnyArray:
    view: AnyArray = array.view()
    view.flags.writeable = False
    return view
