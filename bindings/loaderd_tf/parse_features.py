"""A schema from what a ``tf.data`` pipeline gives to ``tf.io.parse_example``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

import loaderd
from loaderd.options import require

# The dtypes of the numbers in a tf.train.Example.
_KINDS: dict[tf.DType, type[loaderd.Int64 | loaderd.Float]] = {tf.int64: loaderd.Int64, tf.float32: loaderd.Float}
_DESCRIPTIONS = (loaderd.PackedBits, loaderd.Raw)


def schema_from_features(
    features: Mapping[str, Any],
    bytes_features: Mapping[str, loaderd.PackedBits | loaderd.Raw] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> loaderd.Schema:
    """A schema from the dict that ``tf.io.parse_example`` takes.

    ``features``: name -> ``tf.io.FixedLenFeature`` of int64, float32 or string; shapes and defaults are kept. A
    string feature does not say what its bytes hold, so ``bytes_features`` does: ``{"d": loaderd.PackedBits(1552)}``.
    A default that is given there counts, not that of ``features``. ``fields``: the fields of a batch; without it
    every feature is a field of its own name, as it is stored. Raises SchemaError for features of a variable size, for
    which a schema must say how they are padded, for several strings in a feature, and for a dtype that no
    ``tf.train.Example`` has; OptionError for what is no dict of these.
    """
    require(isinstance(features, Mapping), "features", "a dict, name -> tf.io.FixedLenFeature", features)
    is_mapping = isinstance(bytes_features, Mapping | None)
    require(is_mapping, "bytes_features", "a dict, name -> PackedBits or Raw", bytes_features)
    described = dict(bytes_features or {})
    stored: dict[str, Any] = {}
    for name, feature in features.items():
        dtype = _dtype_of(name, feature)
        if name in described:
            stored[name] = _described(name, feature, dtype, described.pop(name))
        else:
            stored[name] = _stored_feature(name, feature, dtype)
    if described:
        raise loaderd.errors.SchemaError(f"bytes_features describes {sorted(described)}, which features lacks")
    return loaderd.Schema.of_stored(stored) if fields is None else loaderd.Schema(features=stored, fields=fields)


def _dtype_of(name: str, feature: Any) -> tf.DType:
    if not isinstance(feature, tf.io.FixedLenFeature):
        raise loaderd.errors.SchemaError(
            f"feature {name!r} must be a tf.io.FixedLenFeature, got {type(feature).__name__}",
            hint="What varies in size is padded: in loaderd.Schema(features, fields), features may have "
            f"{{{name!r}: loaderd.Int64((64,), pad=-1)}}, or Float((64,), pad=0), or Raw('S16', pad=True).",
        )
    return tf.as_dtype(feature.dtype)


def _described(
    name: str, feature: Any, dtype: tf.DType, description: loaderd.PackedBits | loaderd.Raw
) -> loaderd.PackedBits | loaderd.Raw:
    """``description``, with the default of ``feature`` where it has none of its own."""
    require(isinstance(description, _DESCRIPTIONS), f"bytes_features[{name!r}]", "PackedBits or Raw", description)
    if dtype != tf.string or tf.TensorShape(feature.shape).rank != 0:
        raise loaderd.errors.SchemaError(
            f"feature {name!r}, which bytes_features describes, must be one string (shape []), got {dtype.name} of "
            f"shape {feature.shape}",
            hint="Leave int64 and float32 out of bytes_features. loaderd does not read lists of strings.",
        )
    if feature.default_value is None or description.default is not None:
        return description
    default: bytes = tf.constant(feature.default_value, tf.string, []).numpy()
    padded = description.padded(default)
    if padded is None:
        raise loaderd.errors.SchemaError(
            f"feature {name!r}: default_value must have {description.num_bytes} bytes, as {description} says, got "
            f"{len(default)}",
            hint="Leave it out, if every record has the feature, or give bytes_features a default.",
        )
    if isinstance(description, loaderd.PackedBits):
        return replace(description, default=padded)
    return replace(description, default=np.frombuffer(padded, description.dtype).reshape(description.shape))


def _stored_feature(name: str, feature: Any, dtype: tf.DType) -> loaderd.Int64 | loaderd.Float:
    if dtype == tf.string:
        raise loaderd.errors.SchemaError(
            f"feature {name!r} is a string: say what its bytes hold",
            hint=f"Such as bytes_features={{{name!r}: loaderd.PackedBits(1552)}}, or loaderd.Raw('uint8', (784,)).",
        )
    if dtype not in _KINDS:
        raise loaderd.errors.SchemaError(
            f"feature {name!r} must be of int64, float32 or string, got {dtype.name}",
            hint="A record holds nothing else. For another dtype in the batch, give fields, such as "
            f"{{{name!r}: loaderd.Array({name!r}, dtype={dtype.name!r})}}.",
        )
    shape = tuple(tf.TensorShape(feature.shape).as_list())
    return _KINDS[dtype](shape=shape, default=_in_shape(feature.default_value, shape))


def _in_shape(default: Any, shape: tuple[int | None, ...]) -> Any:
    """``default`` in ``shape``, as TensorFlow reshapes it; as it is where it has another number of values."""
    if default is None or None in shape:
        return default
    with contextlib.suppress(ValueError):  # lists of several lengths, or another number of values
        return np.reshape(np.asarray(default), shape)
    return default
