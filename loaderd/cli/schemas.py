"""Schemas that are named on a command line; their modules may be in the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from loaderd.errors import OptionError
from loaderd.schema import Schema


def load_schema(name: str) -> Schema:
    """The schema that MODULE:NAME names, or that the function of that name returns. Raises OptionError."""
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
