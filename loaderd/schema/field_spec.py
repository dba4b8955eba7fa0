"""What all fields share: how one looks, and the checks of the arguments that many have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.schema.features import ByValue, Feature, PackedBits, Shape
from loaderd.schema.records import FixedRecords

Features = Mapping[str, Feature]


@dataclass(frozen=True)
class FieldSpec:
    """What one field of a batch looks like, without the batch dimension."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def record_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tabled(ByValue):
    """A field with tables: shown without what is left to its default, and without the numbers of an array."""

    def __repr__(self) -> str:
        shown = []
        for each in fields(self):  # type: ignore[arg-type]  # each of these is a dataclass
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                shown.append(f"{each.name}=<{value.dtype} {value.shape}>")
            elif value != each.default:
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


_MOST_TABLE_VALUES = 1 << 22


def as_table(given: Any, what: str) -> npt.NDArray[np.int64]:
    """``given`` as an array of integers that nobody can write to. Raises SchemaError."""
    try:
        table = np.array(given)
    except (ValueError, TypeError):
        table = np.empty(0, object)
    if table.dtype.kind not in "iu" or not 0 < table.size <= _MOST_TABLE_VALUES:
        raise SchemaError(f"{what} must be an array of {_MOST_TABLE_VALUES} integers at most, got {given!r:.200}")
    if int(table.max()) > np.iinfo(np.int64).max:
        raise SchemaError(f"{what} must be of integers that int64 holds, got {table.max()}")
    table = table.astype(np.int64)
    table.flags.writeable = False
    return table


def feature_of(name: str, feature: str, features: Features) -> Feature:
    """The feature that field ``name`` reads."""
    if feature not in features:
        raise SchemaError(f"field {name!r} reads feature {feature!r}, which is none of {sorted(features)}")
    return features[feature]


def packed_bits_of(name: str, feature: str, features: Features) -> PackedBits:
    found = feature_of(name, feature, features)
    if not isinstance(found, PackedBits):
        hint = f"If it holds packed bits: FixedRecords(dtype, bits=[{feature!r}, …])."
        raise SchemaError(
            f"field {name!r}: feature {feature!r} must be PackedBits, got {type(found).__name__}",
            hint=hint if isinstance(features, FixedRecords) else "",
        )
    return found


def check_name(name: Any, what: str) -> str:
    """``name``; raises SchemaError unless it is text."""
    if not isinstance(name, str):
        raise SchemaError(f"{what} must be a name, got {name!r:.200}")
    return name


def check_bit_order(value: Any, what: str) -> None:
    """Raise SchemaError unless it is "big" or "little"."""
    if not isinstance(value, str) or value not in ("big", "little"):
        raise SchemaError(f'{what}: bit_order must be "big" or "little", got {value!r:.200}')
