"""tf.data with the unpacking compiled by XLA: the bit arithmetic becomes one fused, vectorised loop.

XLA compiles anew for each batch size it meets: once, and once more for a short batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from candidates._tfdata import cannot_decode, consume, decoded, decoder
from harness.interface import Config, Step

from loaderd import Bits

NOTE = ""

cannot = cannot_decode

_MASKS = {"big": (128 >> np.arange(8)).astype(np.uint8), "little": (1 << np.arange(8)).astype(np.uint8)}


def _unpack(stored: tf.Tensor, field: Bits) -> tf.Tensor:
    """``field``, (n, …), of the bytes it is stored in: ``stored`` uint8, (n, num_bytes)."""
    first, last = field.start // 8, (field.start + field.num_bits - 1) // 8
    used = stored[:, first : last + 1, tf.newaxis]
    bits = tf.cast(tf.bitwise.bitwise_and(used, _MASKS[field.bit_order]), tf.bool)
    skipped = field.start - 8 * first
    cells = tf.reshape(bits, [-1, (last + 1 - first) * 8])[:, skipped : skipped + field.num_bits]
    ordered = tf.gather(
        tf.reshape(cells, [-1, field.num_bits // field.num_channels, field.num_channels]), field.order, axis=-1
    )
    values = tf.cast(ordered, field.dtype)
    if field.scale is not None:
        values *= tf.cast(field.channel_scale, field.dtype)
    return tf.reshape(values, [-1, *field.shape])


def unpack(stored: tf.Tensor, field: Bits) -> tf.Tensor:
    """``field``, (n, …), of the bytes it is stored in, compiled."""
    return tf.function(_unpack, jit_compile=True)(stored, field)


def steps(config: Config) -> Iterator[Step]:
    return consume(decoded(config, decoder(config, unpack)), config)
