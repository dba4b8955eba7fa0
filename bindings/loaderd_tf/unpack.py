"""A device program (``loaderd.schema.device_program``) in TensorFlow's operations, where the model runs.

::

    workers ──packed batch──► device ──► unpack ──► model
                                         └ in one function, XLA fuses the two ┘

Values are chosen as integers of the same bits, and become the field's dtype last, so that nothing takes a subnormal
number for 0, or changes a NaN. Without XLA, TensorFlow adds, slices and reshapes int32 on the host even where the
model runs on a GPU; it shifts, casts and gathers them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from loaderd.options import require
from loaderd.schema import packed_schema as packed_schema_for
from loaderd.schema import unpacking_schema
from loaderd.schema.device_program import (
    Cast,
    Collect,
    Constant,
    ExpandBits,
    LookUp,
    LookUpCodes,
    OneHotOf,
    Permute,
    Put,
    Step,
    as_int64,
)
from loaderd.schema.wire import from_wire, to_wire
from loaderd_tf.structure import check_dtype

Tensors = dict[str, tf.Tensor]
_WITHOUT_BITCAST = ("float8_e5m2", "float8_e4m3fn")


def unpack(packed: Mapping[str, Any], schema: loaderd.Schema) -> Tensors:
    """Make the fields of ``schema`` of a packed batch, by operations that XLA can compile.

    ``packed``: name -> tensor, the batch first: an element of ``make_dataset(…, unpack="device")``, or some of the
    fields of :func:`packed_schema`. Returns name -> tensor in the schema's order: the fields that can be made of
    these, with the values of the workers, bit for bit. Raises OptionError for a tensor that is no such field, and for
    a field of a dtype that TensorFlow cannot compute.
    """
    return Unpacker(schema)(packed)


def packed_schema(schema: loaderd.Schema) -> loaderd.Schema:
    """The schema of batches with ``unpack="device"``, of which :func:`unpack` makes the fields of ``schema``.

    These are stored features, as far as they take fewer bytes, and the fields that the workers finish. A feature has
    its own name, or, where a field has that, the name with " (stored)" behind it.
    """
    require(isinstance(schema, loaderd.Schema), "schema", "a loaderd.Schema", schema)
    return packed_schema_for(schema, for_device=True)


@keras.saving.register_keras_serializable("loaderd_tf")
class Unpack(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """:func:`unpack` as a Keras layer: name -> tensor of packed fields in, name -> tensor of fields out.

    It has no weights, and is saved with the model; the functions of ``Derived`` fields are not part of it.
    """

    def __init__(self, schema: loaderd.Schema, **options: Any) -> None:
        # Packed fields keep their dtype, whatever the model computes in.
        super().__init__(**{"autocast": False, "trainable": False, **options})
        self._unpacker = Unpacker(schema)
        self._schema = unpacking_schema(schema, for_device=True)

    def call(self, packed: Mapping[str, Any]) -> Tensors:
        return self._unpacker(packed)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "schema": to_wire(self._schema)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Unpack:
        return cls(**{**config, "schema": from_wire(config["schema"])})


class Unpacker:
    """Makes the fields ``names`` (None: all) of ``schema`` of packed ones."""

    def __init__(self, schema: loaderd.Schema, names: Collection[str] | None = None) -> None:
        specs = packed_schema(schema).specs
        program = schema.device_program()
        names = program.steps if names is None else names
        self._steps = {
            name: (program.inputs([name]), program.steps[name], program.permutes.get(name, ())) for name in names
        }
        used = program.inputs(names)
        self.inputs = {name: spec for name, spec in specs.items() if name in used}
        """The packed fields that it reads."""
        self._dtypes = {schema.specs[name].dtype for name in self._steps}

    def __call__(self, packed: Mapping[str, Any]) -> Tensors:
        """``packed``: (n, …) each; returns (n, …) each."""
        require(isinstance(packed, Mapping), "packed", "a dict of names and tensors", packed)
        tensors = {name: self._checked(name, value) for name, value in packed.items()}
        flat = {name: tf.reshape(tensor, [tf.shape(tensor)[0], -1]) for name, tensor in tensors.items()}
        fields = {}
        for name, (features, steps, permutes) in self._steps.items():
            if all(feature in flat for feature in features):
                n = tf.shape(flat[features[0]])[0]
                parts = [tf.reshape(_made(flat, step, n), [n, *step.shape]) for step in steps]
                fields[name] = parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)
                for permute in permutes:
                    fields[name] = _permuted(fields[name], permute, flat[permute.feature], n)
        return fields

    def compiled(self) -> Callable[[Tensors], Tensors]:
        """The same as a compiled function of all inputs. Raises OptionError for dtypes that TensorFlow lacks."""
        for name, spec in self.inputs.items():
            check_dtype(name, spec.dtype)
        signature = {name: tf.TensorSpec([None, *spec.shape], spec.dtype) for name, spec in self.inputs.items()}
        # XLA has no text, and makes one NaN of all those of a float8.
        known = not any(dtype.kind == "S" or dtype.name in _WITHOUT_BITCAST for dtype in self._dtypes)
        function = tf.function(self, input_signature=[signature], autograph=False, jit_compile=known)
        return function.get_concrete_function()  # type: ignore[no-any-return]

    def _checked(self, name: str, value: Any) -> tf.Tensor:
        spec = self.inputs.get(name)
        if spec is None:
            raise OptionError(f"packed must have fields of {list(self.inputs)}, got {name!r}")
        tensor, shape = tf.convert_to_tensor(value), (None, *spec.shape)
        if tensor.dtype != tf.as_dtype(spec.dtype) or not tensor.shape.is_compatible_with(shape):
            raise OptionError(
                f"packed[{name!r}] must be {spec.dtype}, {shape}, got {tensor.dtype.name}, {tensor.shape}"
            )
        return tensor


def _made(flat: Tensors, step: Step, n: tf.Tensor) -> tf.Tensor:
    """(n, values)"""
    if isinstance(step, Constant):
        return tf.fill([n, *step.shape], tf.constant(step.value))
    if isinstance(step, Collect):
        return _collect(step, n, *(tf.bitcast(flat[feature], tf.uint8) for feature in step.features))
    if isinstance(step, Put):
        return _put(step, n, flat[step.features[0]], _made(flat, step.values, n))
    stored = flat[step.feature]
    if isinstance(step, LookUpCodes):
        high, low = (tf.cast(tf.gather(stored, each, axis=1), tf.int32) for each in (step.high, step.low))
        words = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, np.int32(8)), low)
        codes = tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, step.shift), np.int32(step.mask))
        return _as(tf.gather(_as_integers(step.table), codes), step.table.dtype)
    if isinstance(step, OneHotOf):
        is_class = tf.cast(stored, tf.int64)[:, :, None] == tf.range(step.classes, dtype=tf.int64)
        one = _as_integers(step.one)
        return _as(tf.where(is_class, one, np.zeros_like(one)), step.one.dtype)
    if isinstance(step, ExpandBits):
        return _expand_bits(stored, step)
    if isinstance(step, LookUp):
        unsigned = np.dtype(f"u{stored.dtype.size}")
        index = _chosen(tf.bitcast(stored, unsigned), step)
        return _as(tf.gather(_as_integers(step.table), tf.cast(index, tf.int32)), step.table.dtype)
    values = _chosen(stored, step)
    as_stored = values.dtype == step.dtype and step.scale is None and step.offset is None
    return values if as_stored else _cast(values, step)


def _permuted(values: tf.Tensor, step: Permute, numbers: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
    """``numbers``: uint8, (n, 1)."""
    num_tables, num_places = step.sources.shape
    number = tf.minimum(tf.cast(numbers[:, 0], tf.int32), num_tables - 1)
    places = tf.gather(step.sources.astype(np.int32), number)
    outer = math.prod(step.shape) // (num_places * step.inner)
    grouped = tf.reshape(values, [n, outer, num_places, step.inner])
    taken = tf.gather(grouped, tf.maximum(places, 0), axis=2, batch_dims=1)
    if (step.sources < 0).any():
        taken = tf.where(places[:, None, :, None] < 0, tf.zeros((), taken.dtype), taken)
    return tf.reshape(taken, [n, *step.shape])


def _expand_bits(stored: tf.Tensor, step: ExpandBits) -> tf.Tensor:
    """Each bit is shifted to the sign of an int32, spread over it, and masks the value."""
    picked = tf.cast(tf.gather(stored, step.byte, axis=1), tf.int32)
    to_sign = 31 - np.log2(step.mask).astype(np.int32)
    spread = tf.bitwise.right_shift(tf.bitwise.left_shift(picked, to_sign), np.int32(31))
    value = _as_integers(step.value)
    return _as(tf.bitwise.bitwise_and(tf.cast(spread, value.dtype), value), step.value.dtype)


def _collect(step: Collect, n: tf.Tensor, bits: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
    """In int32: see ``device_program.Collect``."""
    num_bits = len(step.byte)
    is_set = tf.bitwise.bitwise_and(tf.gather(bits, step.byte, axis=1), step.mask) != 0
    position = tf.broadcast_to(tf.range(num_bits), [n, num_bits])
    if step.nibble_byte is not None:
        shifted = tf.bitwise.right_shift(tf.gather(others[0], step.nibble_byte, axis=1), step.nibble_shift)
        code = tf.cast(tf.bitwise.bitwise_and(shifted, np.uint8(15)), tf.int32)
        rank = tf.clip_by_value(tf.cumsum(tf.cast(is_set, tf.int32), axis=1) - 1, 0, len(step.nibble_byte) - 1)
        position += tf.gather(code, rank, axis=1, batch_dims=1) * step.squares
    at = position
    if step.has_bucket:
        at += tf.cast(others[-1], tf.int32) * step.table.shape[1]
    elif step.bucket_code >= 0:
        square = position - step.bucket_code * step.squares
        is_king = is_set & (square >= 0) & (square < step.squares)
        first = tf.argmax(tf.cast(is_king, tf.int32), axis=1, output_type=tf.int32)[:, None]
        at += tf.gather(square, first, axis=1, batch_dims=1) * step.table.shape[1]
    index = tf.gather(step.table.reshape(-1), at)
    ends = tf.cumsum(tf.cast(is_set & (index >= 0), tf.int32), axis=1)
    if step.counts:
        return tf.cast(ends[:, -1], index.dtype)
    found = tf.searchsorted(ends, tf.broadcast_to(tf.range(1, step.k + 1), [n, step.k]))
    chosen = tf.gather(index, tf.minimum(found, num_bits - 1), axis=1, batch_dims=1)
    return tf.where(found < num_bits, chosen, tf.constant(-1, index.dtype))


def _put(step: Put, n: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Where several values have one index, and where it is -1, all but the last go to a place behind the others."""
    num_values, integer = step.values.count, np.dtype(f"i{step.dtype.itemsize}")
    integers = tf.bitcast(tf.reshape(values, [n, num_values]), integer)
    index = tf.reshape(tf.cast(indices, tf.int64), [n, num_values])
    is_later = np.triu(np.ones((num_values, num_values), bool), 1)
    is_last = ~tf.reduce_any((index[:, :, None] == index[:, None, :]) & is_later, axis=2)
    place = tf.where(is_last & (index >= 0), index, np.int64(step.size))
    row = tf.broadcast_to(tf.range(tf.cast(n, tf.int64))[:, None], tf.shape(place))
    made = tf.tensor_scatter_nd_update(
        tf.zeros([n, step.size + 1], integer), tf.stack([row, place], axis=2), integers
    )
    return _as(made[:, : step.size], step.dtype)


def _chosen(values: tf.Tensor, step: LookUp | Cast) -> tf.Tensor:
    if step.repeat != 1:
        return tf.gather(values, step.first + np.repeat(np.arange(step.count), step.repeat), axis=1)
    return values if step.count == values.shape[1] else values[:, step.first : step.first + step.count]


def _cast(values: tf.Tensor, step: Cast) -> tf.Tensor:
    """Integers to integers in 64 bits, of which the lowest are those of narrower arithmetic."""
    if step.dtype.kind == "f":
        return tf.cast(values, step.dtype)
    values = tf.cast(values, tf.int64)
    if step.scale is not None:
        values *= np.int64(as_int64(step.scale))
    if step.offset is not None:
        values += np.int64(as_int64(step.offset))
    return tf.cast(values, step.dtype)


def _as_integers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.view(f"i{values.dtype.itemsize}")


def _as(integers: tf.Tensor, dtype: np.dtype[Any]) -> tf.Tensor:
    if dtype == np.bool_:
        return tf.cast(integers, tf.bool)
    if dtype.name in _WITHOUT_BITCAST:
        every = np.arange(256).astype(np.uint8).view(dtype)
        return tf.gather(every, tf.cast(tf.bitcast(integers, tf.uint8), tf.int32))
    try:
        return tf.bitcast(integers, dtype)
    except (TypeError, tf.errors.InvalidArgumentError):
        raise OptionError(
            f"TensorFlow cannot unpack fields of {dtype} on a device",
            hint='Give the field another dtype in the schema, or leave out unpack="device".',
        ) from None
