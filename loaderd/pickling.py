"""Data sets as other processes get them: pickled, with the functions of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from loaderd.dataset import AnyDataset, Dataset
from loaderd.errors import LoaderdError, OptionError, SchemaError
from loaderd.ipc.channel import MAX_MESSAGE_BYTES
from loaderd.machine import in_mib
from loaderd.redaction import shown
from loaderd.schema.fields import derived_in

_MOST_SENT_BYTES = MAX_MESSAGE_BYTES - (16 << 20)  # the rest is for the names of shards


def pickled(contents: Any, dataset: AnyDataset | None = None) -> bytes:
    """``contents`` as bytes. Raises SchemaError or OptionError for what of ``dataset``, a part of it, cannot be."""
    try:
        result: bytes = cloudpickle.dumps(contents)
    except Exception as error:
        reasons = (_reason(leaf) for leaf in dataset.leaves()) if dataset is not None else ()
        raise next(filter(None, reasons), error) from None
    return result


def pickled_to_send(description: Any, dataset: AnyDataset | None) -> bytes:
    """As :func:`pickled`, for a message to other processes. Raises SchemaError also where it is too large for one."""
    result = pickled(description, dataset)
    if len(result) > _MOST_SENT_BYTES:
        leaves = dataset.leaves() if dataset is not None else ()
        sizes = {name: len(cloudpickle.dumps(function)) for leaf in leaves for name, function in _functions_of(leaf)}
        largest = max(sizes, key=sizes.__getitem__, default=None)
        of_field = (
            "" if largest is None else f", {in_mib(sizes[largest])} of it for the function of field {largest!r}"
        )
        raise SchemaError(
            f"a data set must take at most {in_mib(_MOST_SENT_BYTES)} when it is pickled, for the worker processes, "
            f"got {in_mib(len(result))}{of_field}",
            hint="Load a large table from a file inside the function, or have both in a module that can be imported: "
            "then each worker makes its own.",
        )
    return result


def _reason(leaf: Dataset) -> LoaderdError | None:
    """Why ``leaf`` cannot be pickled; None: its functions and its file system can be."""
    for name, function in _functions_of(leaf):
        if failure := _failure(function):
            return SchemaError(
                f"field {name!r} must be derived by a function that can be pickled, for the worker processes, "
                f"but {_culprit(function)}: {failure}",
                hint="Create that object inside the function, or have both in a module that can be imported: then "
                "each worker makes its own.",
            )
    if failure := _failure(leaf.storage.filesystem):
        return OptionError(
            f"Storage.filesystem must be one that can be pickled, for the worker processes, "
            f"got {shown(leaf.storage.filesystem, 200)}: {failure}"
        )
    return None


def _functions_of(leaf: Dataset) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The derived fields, each with its function."""
    for name in leaf.schema.evaluation_order:
        for derived in derived_in(leaf.schema.definition_of(name)):
            yield name, derived.function


def _culprit(function: Callable[..., Any]) -> str:
    """What of a function cannot be pickled, in words."""
    for name, value in _used(function).items():
        if _failure(value):
            return f"{name!r} ({type(value).__qualname__}), which it uses, cannot be"
    return f"{getattr(function, '__qualname__', None) or repr(function)} cannot be"


def _used(function: Callable[..., Any]) -> dict[str, Any]:
    """By name, the values that a function refers to, or the attributes of a callable object."""
    import inspect  # needed only where a function cannot be pickled

    if not inspect.isfunction(function):
        return dict(getattr(function, "__dict__", {}))
    used = inspect.getclosurevars(function)
    return {**used.nonlocals, **used.globals}


def _failure(value: Any) -> str:
    """Why ``value`` cannot be pickled; "" if it can be."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
