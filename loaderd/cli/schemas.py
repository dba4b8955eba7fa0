"""Schemas that are named on a command line: those that ship by their names, others by their modules, which may be in
the current folder.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from loaderd.errors import OptionError
from loaderd.schema import Schema

_MODULE = "loaderd.schemas"
_SHIPPED = ("chess_eval", "katago", "lc0", "minigo", "mnist")
SCHEMA_HELP = f"a loaderd.Schema, or a function that returns one; or one that ships: {', '.join(_SHIPPED)}"


def load_schema(name: str) -> Schema:
    """The schema that MODULE:NAME names, or that the function of that name returns; or one that ships, as "lc0".

    Raises OptionError.
    """
    if ":" not in name:
        close = difflib.get_close_matches(name, _SHIPPED, n=1)
        hint = f"Did you mean {close[0]}?" if close else "Others are named MODULE:NAME, as mypackage.records:schema."
        if name not in _SHIPPED:
            raise OptionError(f"--schema {name} is none of {', '.join(_SHIPPED)}", hint=hint)
        name = f"{_MODULE}:{name}"
    sys.path.insert(0, os.getcwd())
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
        schema = found if isinstance(found, Schema) else found()
    except Exception as error:
        raise OptionError(f"--schema {name} cannot be had: {type(error).__name__}: {error}") from None
    if not isinstance(schema, Schema):
        raise OptionError(f"--schema {name} must be a loaderd.Schema, got {type(schema).__name__}")
    return schema
