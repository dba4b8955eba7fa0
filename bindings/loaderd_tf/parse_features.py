"""A schema from what a ``tf.data`` pipeline gives to ``tf.io.parse_example``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import loaderd
from loaderd.options import require

# The dtypes of the numbers in a tf.train.Example.
_KINDS: dict[tf.DType, type[loaderd.Int64 | loaderd.Float]] = {tf.int64: loaderd.Int64, tf.float32: loaderd.Float}


def schema_from_features(
    features: Mapping[str, Any],
    bytes_features: Mapping[str, loaderd.PackedBits | loaderd.Raw] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> loaderd.Schema:
    """A schema from the dict that ``tf.io.parse_example`` takes.

    ``features``: name -> ``tf.io.FixedLenFeature`` of int64, float32 or string; shapes and defaults are kept. A
    string feature does not say what its bytes hold, so ``bytes_features`` does: ``{"d": loaderd.PackedBits(1552)}``.
    ``fields``: the fields of a batch; without it every feature is a field of its own name, as it is stored. Raises
    SchemaError for features of a variable size, which don't fit in a fixed batch, and of a dtype that no
    ``tf.train.Example`` has; OptionError for what is no dict.
    """
    require(isinstance(features, Mapping), "features", "a dict, name -> tf.io.FixedLenFeature", features)
    is_mapping = isinstance(bytes_features, Mapping | None)
    require(is_mapping, "bytes_features", "a dict, name -> PackedBits or Raw", bytes_features)
    described = dict(bytes_features or {})
    stored: dict[str, Any] = {}
    for name, feature in features.items():
        stored[name] = described.pop(name) if name in described else _stored_feature(name, feature)
    if described:
        raise loaderd.errors.SchemaError(f"bytes_features describes {sorted(described)}, which features lacks")
    return loaderd.Schema.of_stored(stored) if fields is None else loaderd.Schema(features=stored, fields=fields)


def _stored_feature(name: str, feature: Any) -> loaderd.Int64 | loaderd.Float:
    if not isinstance(feature, tf.io.FixedLenFeature):
        raise loaderd.errors.SchemaError(
            f"feature {name!r} must be a tf.io.FixedLenFeature, got {type(feature).__name__}",
            hint="loaderd reads records of a fixed size.",
        )
    dtype = tf.as_dtype(feature.dtype)
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
    return _KINDS[dtype](shape=shape, default=feature.default_value)
