"""Features and fields as the Python that makes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np


def quoted(name: str) -> str:
    """A literal of Python in double quotes, as formatters want them."""
    return json.dumps(name, ensure_ascii=False)  # else a letter beyond U+FFFF became two surrogates


def as_python(part: Any) -> str:
    """``loaderd.Bits("planes", (8, 8, 24))``: a feature or a field, with the arguments that are not defaults."""
    return f"loaderd.{type(part).__name__}({', '.join(_arguments(part))})"


def _arguments(part: Any) -> Iterator[str]:
    for number, field in enumerate(dataclasses.fields(part)):
        value = getattr(part, field.name)
        comparable = isinstance(value, (type(field.default), np.dtype)) and field.default is not None
        is_default = value is field.default or (comparable and value == field.default)
        if not is_default or (number == 0 and value != ()):  # Raw("uint8") says more than Raw()
            by_place = number == 0 or (number == 1 and field.name == "shape")
            yield literal(value) if by_place else f"{field.name}={literal(value)}"


def literal(value: Any) -> str:
    """A value as Python: of a dtype its name, as numpy knows it."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, np.dtype):
        return quoted(value.name if value.kind in "biuf" and value.isnative else value.str.replace("|", ""))
    if isinstance(value, bytes) and len(value) > 1 and not any(value):
        return f"bytes({len(value)})"
    return "()" if value == [] else repr(value)
