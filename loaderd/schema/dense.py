"""Dense fields of numbers that say where: values scattered to their indices, and one place of many that is 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loaderd.errors import SchemaError
from loaderd.schema.exact import is_cast
from loaderd.schema.features import ByValue, PackedBits, Shape, check_integer, check_shape, resolve_dtype
from loaderd.schema.field_spec import Features, FieldSpec, check_name, feature_of
from loaderd.schema.representable import check_holds_numbers, check_representable, holds_numbers

_MOST_CLASSES = 1 << 24


@dataclass(frozen=True, eq=False)
class Scatter(ByValue):
    """``values`` at their ``indices`` in an array of ``shape``, in C order; everywhere else, 0.

    Both name features of the same length; ``indices`` holds integers. An index of -1 leaves its value out; any other
    that ``shape`` does not have is a WorkerError. ``duplicates``: of values with one index, only the last counts
    (``"last"``), or they are added up in their order, in ``dtype`` (``"sum"``; a sum of integers that it does not
    hold wraps, as numpy's do). Values are cast as by :class:`Array`.
    """

    indices: str
    values: str
    shape: Shape
    duplicates: str = "last"
    dtype: Any = "float32"

    reads = ("indices", "values")

    def __post_init__(self) -> None:
        check_name(self.indices, "Scatter: indices")
        check_name(self.values, "Scatter: values")
        object.__setattr__(self, "shape", check_shape(self.shape, "Scatter"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        check_holds_numbers(self.dtype, "Scatter")
        if self.duplicates not in ("last", "sum") or (self.duplicates == "sum" and self.dtype.kind not in "iufc"):
            raise SchemaError(
                f'Scatter: duplicates must be "last", or "sum" in one of numpy\'s dtypes of numbers, got '
                f"{self.duplicates!r:.200} in {self.dtype}"
            )

    def spec(self, name: str, features: Features) -> FieldSpec:
        indices, values = (feature_of(name, each, features) for each in (self.indices, self.values))
        if isinstance(indices, PackedBits) or indices.value_dtype.kind not in "iu":
            raise SchemaError(f"field {name!r}: feature {self.indices!r} must hold integers, got {indices}")
        if isinstance(values, PackedBits) or values.num_values != indices.num_values:
            raise SchemaError(
                f"field {name!r}: feature {self.values!r} must hold {indices.num_values} values, as many as "
                f"there are indices, got {values}"
            )
        if not holds_numbers(values.value_dtype) or not is_cast(values.value_dtype, self.dtype):
            raise SchemaError(f"field {name!r}: {values.value_dtype} cannot be cast to {self.dtype}")
        return FieldSpec(self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class OneHot(ByValue):
    """``classes`` values for each integer of a feature: 1 at the place that it names, else 0.

    The field has the shape (\\*the feature's shape, classes).

    ``outside``: an integer that is no class is a WorkerError (``"error"``), or all of its values are 0 (``"zeros"``).
    """

    feature: str
    classes: int
    outside: str = "error"
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        check_name(self.feature, "OneHot: feature")
        object.__setattr__(self, "classes", check_integer(self.classes, "OneHot: classes", 1, _MOST_CLASSES))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        check_representable((0, 1), self.dtype, "OneHot: dtype")
        if self.outside not in ("error", "zeros"):
            raise SchemaError(f'OneHot: outside must be "error" or "zeros", got {self.outside!r:.200}')

    def spec(self, name: str, features: Features) -> FieldSpec:
        feature = feature_of(name, self.feature, features)
        if isinstance(feature, PackedBits) or feature.value_dtype.kind not in "iu":
            raise SchemaError(f"field {name!r}: feature {self.feature!r} must hold integers, got {feature}")
        return FieldSpec(check_shape((*feature.shape, self.classes), f"field {name!r}"), self.dtype)
