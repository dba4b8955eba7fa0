"""Data sets as other processes get them: pickled, with the functions of their fields."""

from __future__ import annotations

from typing import Any

import cloudpickle

from loaderd.dataset import AnyDataset, Dataset
from loaderd.errors import LoaderdError, OptionError, SchemaError
from loaderd.ipc.channel import MAX_MESSAGE_BYTES
from loaderd.machine import in_mib
from loaderd.redaction import shown
from loaderd.schema.fields import Derived, derived_in

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
        raise SchemaError(
            f"a data set must take at most {in_mib(_MOST_SENT_BYTES)} when it is pickled, for the worker processes, "
            f"got {in_mib(len(result))}",
            hint="Load a large table from a file inside the function of its field, or have both in a module that can "
            "be imported: then each worker makes its own.",
        )
    return result


def _reason(leaf: Dataset) -> LoaderdError | None:
    """Why ``leaf`` cannot be pickled; None: its functions and its file system can be."""
    for name in leaf.schema.evaluation_order:
        for derived in derived_in(leaf.schema.definition_of(name)):
            if failure := _failure(derived.function):
                return SchemaError(
                    f"field {name!r} must be derived by a function that can be pickled, with all that it uses, for "
                    f"the worker processes, but {shown(derived.function, 200)} cannot be: {failure}",
                    hint="Create the object that it uses inside the function, or have both in a module that can be "
                    "imported: then each worker makes its own.",
                )
    weight = getattr(leaf.sample, "weight", None)
    for what, of_records in (("where", leaf.where), ("the weight of sample", weight)):
        if isinstance(of_records, Derived) and (failure := _failure(of_records.function)):
            return OptionError(
                f"{what} must be a function that can be pickled, with all that it uses, for the worker processes, "
                f"but {shown(of_records.function, 200)} cannot be: {failure}"
            )
    if failure := _failure(leaf.storage.filesystem):
        return OptionError(
            f"Storage.filesystem must be one that can be pickled, for the worker processes, "
            f"got {shown(leaf.storage.filesystem, 200)}: {failure}"
        )
    return None


def _failure(value: Any) -> str:
    """Why ``value`` cannot be pickled; "" if it can be."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
