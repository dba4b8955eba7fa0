"""A schema from what a ``tf.data`` pipeline gives to ``tf.io.parse_example``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import loaderd
from loaderd.errors import SchemaError
from loaderd.options import require
from loaderd.schema.board_shapes import fields_of

_NUMBERS = {tf.int64: loaderd.Int64, tf.float32: loaderd.Float}


def schema_from_features(
    features: Mapping[str, Any],
    bytes_features: Mapping[str, loaderd.PackedBits | loaderd.Raw] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> loaderd.Schema:
    """A schema from the dict that ``tf.io.parse_example`` takes.

    ``features``: name -> ``tf.io.FixedLenFeature`` of int64, float32 or string; shapes and defaults are kept. A
    string feature does not say what its bytes hold, so ``bytes_features`` does, and has its default:
    ``{"d": loaderd.PackedBits(1552)}``. ``fields``: the fields of a batch. Without it, every feature is a field of
    its own name: numbers as they are stored; bits as boards, planes last, if their number is that of boards (1,536:
    (8, 8, 24)), else in one row. ``loaderd inspect --features`` proposes the same fields; it
    looks at records, and may choose another shape.

    Raises SchemaError for features of a variable size, for which a schema must say how they are padded, for strings
    that are not described, for several strings in a feature, and for a dtype that no ``tf.train.Example`` has.
    """
    require(isinstance(features, Mapping), "features", "a dict, name -> tf.io.FixedLenFeature", features)
    is_mapping = isinstance(bytes_features, Mapping | None)
    require(is_mapping, "bytes_features", "a dict, name -> PackedBits or Raw", bytes_features)
    described = bytes_features or {}
    unknown = sorted(described.keys() - features.keys())
    if unknown:
        raise SchemaError(f"bytes_features describes {unknown}, which features lacks")
    stored = {name: _stored_feature(name, feature, described.get(name)) for name, feature in features.items()}
    return loaderd.Schema(features=stored, fields=fields_of(stored) if fields is None else fields)


def _stored_feature(name: str, feature: Any, description: Any) -> Any:
    if not isinstance(feature, tf.io.FixedLenFeature):
        raise SchemaError(
            f"feature {name!r} must be a tf.io.FixedLenFeature, got {type(feature).__name__}",
            hint="What varies in size is padded: in loaderd.Schema(features, fields), features may have "
            f"{{{name!r}: loaderd.Int64((64,), pad=-1)}}, or Float((64,), pad=0), or Raw('S16', pad=True).",
        )
    dtype, shape = tf.as_dtype(feature.dtype), tf.TensorShape(feature.shape)
    if dtype == tf.string:
        if not isinstance(description, (loaderd.PackedBits, loaderd.Raw)) or shape.rank != 0:
            raise SchemaError(
                f"feature {name!r} must be one string (shape []), and bytes_features must say what it holds, "
                f"got {description} and shape {shape}",
                hint=f"Such as bytes_features={{{name!r}: loaderd.PackedBits(1552)}}, or loaderd.Raw('uint8', "
                "(784,)); loaderd inspect SHARDS --features guesses it from records. Lists of strings are "
                "loaderd.Raw('S16', (8,), pad=True, as_list=True) in a Schema.",
            )
        if feature.default_value is not None and description.default is None:
            raise SchemaError(
                f"feature {name!r}: default_value of a string must be left out, got {feature.default_value!r}",
                hint=f"Give the default to what bytes_features says of {name!r}.",
            )
        return description
    if dtype not in _NUMBERS or description is not None:
        raise SchemaError(
            f"feature {name!r} must be of int64 or float32, or of string if bytes_features describes it, "
            f"got {dtype.name}",
            hint="A record holds nothing else. For another dtype in the batch, give fields, such as "
            f"{{{name!r}: loaderd.Array({name!r}, dtype={dtype.name!r})}}.",
        )
    default = feature.default_value
    with contextlib.suppress(ValueError):  # another number of values, which the feature refuses
        default = None if default is None else np.reshape(np.asarray(default), shape)  # as TensorFlow does
    return _NUMBERS[dtype](shape=tuple(shape.as_list()), default=default)
