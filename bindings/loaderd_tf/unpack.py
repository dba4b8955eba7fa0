"""Makes fields of stored features by TensorFlow, where the model runs: the last step of decoding, on the device.

::

    workers ──stored features──► tf.data ──► device ──► unpack ──► model
                                                        └ in one function: XLA fuses the two ┘

Every value is that of the workers, bit for bit, with XLA or without. XLA may round ``x * scale + offset`` once
instead of twice, and TensorFlow takes subnormal numbers for 0, so no arithmetic is done in floats:

==========  ==================================================================================================
``Bits``    a bit is shifted to the sign of an integer, spread over it, and masks the bytes of the scale
``Packed``  as it is
``Array``   neither cast nor scaled: as it is; stored in one or two bytes: looked up in a table that numpy makes
            (integers that are only cast, to what holds them all: cast); integers to integers: computed
==========  ==================================================================================================

The workers finish the rest: ``Derived``; ``Planes``, ``Spread`` and ``Fill``; ``Bits`` in padded planes or with the
least significant bit first; ``Array`` from the middle of a feature, of wider floats, of wider integers that become
floats, of bool, of floats that become integers, and of integers whose values may not fit (of features from
elsewhere, these wrap); dtypes that only ml_dtypes knows (but bfloat16). And they finish
what would take more bytes stored than finished, such as an ``Int64`` that becomes an int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from loaderd.options import require
from loaderd.schema.exact import ExactCast
from loaderd.schema.wire import from_wire, to_wire

_MAX_TABLE_ITEMSIZE = 2  # bytes of a stored value; the table has an entry for each possible one
_MAX_GROUP_BYTES = 4  # of an int32


def unpack(packed: Mapping[str, Any], schema: loaderd.Schema) -> dict[str, Any]:
    """The fields of ``schema`` from its stored features, by operations that XLA can compile.

    ``packed``: name -> tensor, the batch first: an element of ``make_dataset(…, unpack="device")``, or stored
    features from elsewhere: uint8, (n, num_bytes), for ``PackedBits``; ``(n, *shape)`` in the dtype that is stored
    for the others. Returns name -> tensor in the schema's order: the fields that can be computed from these features,
    and those that ``packed`` holds finished. Raises OptionError for a tensor that is neither feature nor field.
    """
    stored, finished = {}, {}
    require(isinstance(packed, Mapping), "packed", "a dict of names and tensors", packed)
    steps = _steps(schema)
    for name, value in packed.items():
        tensor = tf.convert_to_tensor(value)
        if name in schema.features and _has_form(tensor, *_stored_form(schema.features[name])):
            stored[name] = tensor
        if name in schema.fields and _has_form(tensor, schema.spec_of(name).dtype, schema.spec_of(name).shape):
            finished[name] = tensor
        if name not in stored and name not in finished:
            raise OptionError(f"packed[{name!r}] must be {_expected(schema, name)}, got {_form(tensor)}")
    fields = {}
    for name in schema.fields:
        step = steps.get(name)
        if step is not None and step.feature in stored and (step.travels or name not in finished):
            fields[name] = step.operation(stored[step.feature])
        elif name in finished:
            fields[name] = finished[name]
    return fields


def packed_schema(schema: loaderd.Schema) -> loaderd.Schema:
    """What the workers deliver for :func:`unpack` to finish: the schema of ``make_dataset(…, unpack="device")``.

    Its fields are those stored features, under their own names, from which ``unpack`` computes fields of ``schema``,
    and the fields that it leaves to the workers. Raises OptionError where a feature and a field of the same name
    would both have to be delivered.
    """
    fields: dict[str, Any] = {}
    steps = _steps(schema)
    for name, definition in schema.fields.items():
        delivered, as_what = name, definition
        if name in steps and steps[name].travels:
            delivered = steps[name].feature
            is_packed = isinstance(schema.features[delivered], loaderd.PackedBits)
            as_what = loaderd.Packed(delivered) if is_packed else loaderd.Array(delivered)
        if fields.setdefault(delivered, as_what) != as_what:
            raise OptionError(
                f"field {delivered!r} is finished by the workers, and feature {delivered!r} is unpacked on the "
                "device: both would be delivered under one name",
                hint="Give the field another name.",
            )

    # A derived field may need fields that are not delivered now, and features that are may have their names.
    every = {**schema.intermediates, **schema.fields}
    names = {name: name if fields.get(name, made) == made else f"{name} (decoded)" for name, made in every.items()}

    def renamed(name: str, definition: Any) -> Any:
        if isinstance(definition, loaderd.Planes):
            return loaderd.Planes([renamed(name, part) for part in definition.parts])
        if not isinstance(definition, loaderd.Derived):
            return definition
        stream = name if definition.random is True else definition.random
        return replace(definition, inputs=[names[source] for source in definition.inputs], random=stream)

    intermediates = {names[name]: renamed(name, made) for name, made in every.items() if names[name] not in fields}
    return loaderd.Schema(
        schema.features, {name: renamed(name, definition) for name, definition in fields.items()}, intermediates
    )


def check_unpacked(schema: loaderd.Schema) -> None:
    """Raise OptionError where nothing of ``schema`` is left to ``unpack``."""
    if not any(step.travels and step.computes for step in _steps(schema).values()):
        fields = ", ".join(f"{name!r} ({type(field).__name__})" for name, field in schema.fields.items())
        raise OptionError(
            f'unpack must be "worker" where no field can be unpacked on the device, got "device" for the fields '
            f"{fields}",
            hint="Bits without plane_bytes can be, and Array that casts what is stored in one or two bytes.",
        )


@keras.saving.register_keras_serializable("loaderd_tf")
class Unpack(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """:func:`unpack` as a Keras layer: name -> tensor of stored features in, name -> tensor of fields out.

    It makes the fields that can be computed from stored features, and raises OptionError if it is given others. It
    has no weights, and is saved with the model.
    """

    def __init__(self, schema: loaderd.Schema, **options: Any) -> None:
        # Features keep the dtype in which they are stored, whatever the model computes in.
        super().__init__(**{"autocast": False, "trainable": False, **options})
        steps = _steps(schema)
        self._schema = loaderd.Schema(
            {step.feature: schema.features[step.feature] for step in steps.values()},
            {name: schema.fields[name] for name in steps},
        )

    def call(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        return unpack(packed, self._schema)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "schema": to_wire(self._schema)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Unpack:
        return cls(**{**config, "schema": from_wire(config["schema"])})


# ------------------------------------------------------------------------------- which field, by which operations

_Operation = Callable[[Any], Any]
_Form = tuple[np.dtype[Any], tuple[int, ...]]  # dtype and shape, without the batch dimension


@dataclass(frozen=True)
class _Step:
    """How to make a field of a stored ``feature``, exactly as the workers do.

    ``travels``: whether the workers leave it to ``unpack``. They don't where the field is smaller than the feature.
    ``computes``: whether the values of the field differ from those of the feature.
    """

    feature: str
    operation: _Operation
    travels: bool
    computes: bool


def _steps(schema: loaderd.Schema) -> dict[str, _Step]:
    """The step of each field by name, without fields that only the workers can make."""
    require(isinstance(schema, loaderd.Schema), "schema", "a loaderd.Schema", schema)
    steps = {}
    for name, definition in schema.fields.items():
        if isinstance(definition, (loaderd.Derived, loaderd.Spread, loaderd.Fill, loaderd.Planes)):
            continue
        if isinstance(definition, loaderd.Array) and definition.first is not None:
            continue
        spec, (stored, _) = schema.spec_of(name), _stored_form(schema.features[definition.feature])
        operation: _Operation | None
        computes = True
        if isinstance(definition, loaderd.Packed):
            computes = False
            operation = partial(_reshape, shape=spec.shape)
        elif isinstance(definition, loaderd.Bits):
            is_plain = definition.bit_order == "big" and definition.plane_bytes is None
            operation = partial(_expand, field=definition) if is_plain and _is_common(definition.dtype) else None
        else:
            computes = not _is_as_stored(definition, stored, spec.dtype)
            operation = _array_operation(definition, stored, spec.dtype, spec.shape)
        if operation is not None:
            travels = not isinstance(definition, loaderd.Array) or (
                stored.itemsize <= spec.dtype.itemsize and not _is_checked(definition, stored, spec.dtype)
            )
            steps[name] = _Step(definition.feature, operation, travels, computes)
    return steps


def _stored_form(feature: Any) -> _Form:
    """The dtype and shape in which the workers deliver a stored feature."""
    if isinstance(feature, loaderd.PackedBits):
        return np.dtype(np.uint8), (feature.num_bytes,)
    return feature.value_dtype.newbyteorder("="), feature.shape


def _has_form(tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    same_shape: bool = tensor.shape.is_compatible_with([None, *shape])
    if dtype.kind == "S":  # TensorFlow's text has no length
        return same_shape and tensor.dtype == tf.string
    return same_shape and np.dtype(tensor.dtype.as_numpy_dtype) == dtype


def _expected(schema: loaderd.Schema, name: str) -> str:
    forms = [_stored_form(schema.features[name])] if name in schema.features else []
    if name in schema.fields:
        forms.append((schema.spec_of(name).dtype, schema.spec_of(name).shape))
    shown = dict.fromkeys(f"{dtype}, ({', '.join(map(str, ('n', *shape)))})" for dtype, shape in forms)
    return " or ".join(shown) or f"named as one of {sorted({*schema.features, *schema.fields})}"


def _form(tensor: Any) -> str:
    return f"{tensor.dtype.name}, {tensor.shape}"


def _array_operation(
    field: loaderd.Array, stored: np.dtype[Any], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> _Operation | None:
    if not (_is_common(stored) and _is_common(dtype)):
        return None
    if _is_as_stored(field, stored, dtype):
        return partial(_reshape, shape=shape)
    # numpy says nowhere what it makes of bytes other than 0 and 1 as bool, and of floats beyond an integer's range.
    if stored.kind == "b" or (stored.kind not in "iu" and dtype.kind in "iu"):
        return None
    if stored.itemsize <= _MAX_TABLE_ITEMSIZE:
        if field.scale is None and field.offset is None and stored.kind in "iu" and np.can_cast(stored, dtype):
            return lambda values: _reshape(tf.cast(values, dtype), shape)
        return lambda values: _reshape(_look_up(values, field, stored, dtype), shape)
    if stored.kind in "iu" and dtype.kind in "iu":
        return lambda values: _reshape(_compute(values, field, dtype), shape)
    return None


def _is_checked(field: loaderd.Array, stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether the workers look for values that the field's integers do not hold."""
    return not field.wrap and ExactCast(stored, dtype, field.scale, field.offset).is_needed


def _is_as_stored(field: loaderd.Array, stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    return field.scale is None and field.offset is None and stored == dtype


def _is_common(dtype: np.dtype[Any]) -> bool:
    """Whether TensorFlow has all operations for this dtype; not for float8, nor for dtypes of less than a byte."""
    return dtype.name in ("bool", "bfloat16", "float16", "float32", "float64") or dtype.kind in "iu"


# -------------------------------------------------------------------------------------------------- the operations
#
# Without XLA, TensorFlow reshapes and slices int32 on the host even where the model runs on a GPU. So integers are
# sliced while they are bytes, and reshaped when they are values of the field.


def _reshape(values: Any, shape: tuple[int, ...]) -> Any:
    return tf.reshape(values, [-1, *shape])


def _expand(stored: Any, field: loaderd.Bits) -> Any:
    """The values of a Bits field: ``stored`` uint8, (n, num_bytes of the feature)."""
    lead, channels = field.start % 8, field.num_channels
    num_bytes = (lead + field.num_bits + 7) // 8
    used = stored[:, field.start // 8 : field.start // 8 + num_bytes]
    order, scale = field.order, field.channel_scale
    group_bytes = math.lcm(channels, 8) // 8
    if np.array_equal(order, np.arange(channels)):
        # Each bit stays where it is. What else the first and the last byte hold is cut off at the end.
        scales = np.zeros(8 * num_bytes, field.dtype)
        scales[lead : lead + field.num_bits] = np.resize(scale, field.num_bits)
        values = _masked(_words(used, 1), np.arange(8), scales.reshape(num_bytes, 8))
        values = tf.reshape(values, [-1, 8 * num_bytes])[:, lead : lead + field.num_bits]
    elif lead == 0 and group_bytes <= _MAX_GROUP_BYTES and field.num_bits % (8 * group_bytes) == 0:
        source = _source(order, 8 * group_bytes)
        values = _masked(_words(used, group_bytes), source, np.resize(scale, len(source)))
    else:
        source = lead + _source(order, field.num_bits)
        picked = tf.bitwise.left_shift(tf.cast(tf.gather(used, source // 8, axis=1), tf.int32), 24)
        values = _masked(picked, source % 8, np.resize(scale, field.num_bits))
    return _reshape(values, field.shape)


def _source(order: npt.NDArray[np.intp], num_bits: int) -> npt.NDArray[np.intp]:
    """intp, (num_bits,): from which bit, counted from the first channel's, each of the first values comes."""
    value = np.arange(num_bits)
    channel = value % len(order)
    return value - channel + order[channel]


def _words(used: Any, size: int) -> Any:
    """int32, (n, groups, 1): each ``size`` bytes of ``used``, uint8 (n, groups * size), from the highest bit down."""
    groups = tf.reshape(used, [-1, used.shape[1] // size, size])
    parts = [tf.bitwise.left_shift(tf.cast(groups[:, :, i : i + 1], tf.int32), 24 - 8 * i) for i in range(size)]
    return reduce(tf.bitwise.bitwise_or, parts)


def _masked(words: Any, bit: npt.NDArray[np.intp], scale: npt.NDArray[Any]) -> Any:
    """``scale`` where ``bit``, counted from the highest, of ``words`` (int32) is set, else 0; all three broadcast."""
    highest = tf.bitwise.left_shift(words, bit.astype(np.int32))
    every = tf.bitwise.right_shift(highest, np.int32(31))  # the shift of a signed integer repeats its sign
    integer = np.dtype(f"i{scale.dtype.itemsize}")
    values = tf.bitwise.bitwise_and(tf.cast(every, integer), scale.view(integer))
    return tf.cast(values, tf.bool) if scale.dtype.kind == "b" else tf.bitcast(values, scale.dtype)


def _look_up(values: Any, field: loaderd.Array, stored: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    """``cast(value) * scale + offset`` of each value that is stored in one or two bytes, rounded as numpy does."""
    unsigned = np.dtype(f"u{stored.itemsize}")
    with np.errstate(all="ignore"):
        table = np.arange(1 << 8 * stored.itemsize).astype(unsigned).view(stored).astype(dtype)
        if field.scale is not None:
            np.multiply(table, np.asarray(field.scale, dtype), out=table)
        if field.offset is not None:
            np.add(table, np.asarray(field.offset, dtype), out=table)
    return tf.gather(table, tf.cast(tf.bitcast(values, unsigned), tf.int32))


def _compute(values: Any, field: loaderd.Array, dtype: np.dtype[Any]) -> Any:
    """The same from integers to integers, in 64 bits, of which the lowest are those of narrower arithmetic."""
    values = tf.cast(values, tf.int64)
    if field.scale is not None:
        values *= np.asarray(field.scale, dtype).astype(np.int64)
    if field.offset is not None:
        values += np.asarray(field.offset, dtype).astype(np.int64)
    return tf.cast(values, dtype)
