"""Schemas by their names on a command line: a short one for those that ship, MODULE:NAME for others."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from loaderd import schemas
from loaderd.errors import OptionError
from loaderd.schema import Derived, Schema
from loaderd.schema.record_values import RecordValues
from loaderd.user_modules import add_working_directory

_MODULE = "loaderd.schemas"
_SHIPPED = tuple(name for name in schemas.__all__ if name != "chess_score")  # which is no schema
SCHEMA_HELP = f"a loaderd.Schema, a function that returns one, or one that ships: {', '.join(_SHIPPED)}"


WHERE_HELP = "the loaderd.Derived of where=, or a Dataset with where= or a weight of sample=; needs --schema"


def full_name(name: str) -> str:
    """The name as MODULE:NAME. Raises OptionError for a short one of no schema that ships."""
    if ":" in name:
        return name
    if name not in _SHIPPED:
        close = difflib.get_close_matches(name, _SHIPPED, n=1)
        hint = (
            f"Did you mean {close[0]}?"
            if close
            else "Others are named MODULE:NAME, such as mypackage.records:schema."
        )
        raise OptionError(f"--schema must be MODULE:NAME or one of {', '.join(_SHIPPED)}, got {name}", hint=hint)
    return f"{_MODULE}:{name}"


def load_schema(name: str) -> Schema:
    """The schema of that name, or that the function of that name returns; its module may be in the working directory.

    Raises OptionError.
    """
    name = full_name(name)
    try:
        named = _named(name)
        schema = named if isinstance(named, Schema) else named()
    except Exception as error:
        raise not_loaded(name, error) from None
    if not isinstance(schema, Schema):
        raise OptionError(f"--schema {name} must be a loaderd.Schema, got {type(schema).__name__}")
    return schema


def values_of(schema: Schema | None, name: str) -> RecordValues:
    """What records of ``schema`` are to be asked by ``--where name``. Raises OptionError and SchemaError."""
    if schema is None:
        raise OptionError("--where needs --schema, which says what the records hold")
    try:
        named = _named(name)
    except Exception as error:
        raise OptionError(f"--where {name} cannot be loaded: {type(error).__name__}: {error}") from None
    where = getattr(named, "where", named)
    weight = getattr(getattr(named, "sample", None), "weight", None)
    if not isinstance(where, Derived) and (where is not None or weight is None):
        got = f"{type(named).__name__}{' without' if hasattr(named, 'where') else ''}"
        must = "a loaderd.Derived, or a Dataset with where= or a weight of sample="
        raise OptionError(f"--where {name} must be {must}, got {got}")
    return RecordValues.of(schema, where, weight)


def _named(name: str) -> Any:
    add_working_directory(name)
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def not_loaded(name: str, error: Exception) -> OptionError:
    """What is raised because a module, or a function in it, raised ``error``."""
    return OptionError(f"--schema {name} cannot be loaded: {type(error).__name__}: {error}")
