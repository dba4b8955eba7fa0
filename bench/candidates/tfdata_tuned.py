"""tf.data as its performance guide has it: parallel, batched before it parses, unpacked by gather and mask.

For each output bit, the byte that stores it is gathered and masked; indices and masks are constants.
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


def _unpack(stored: tf.Tensor, field: Bits) -> tf.Tensor:
    """``field``, (n, …), of the bytes it is stored in: ``stored`` uint8, (n, num_bytes)."""
    cells = field.num_bits // field.num_channels
    place = field.start + (np.arange(cells)[:, np.newaxis] * field.num_channels + field.order).ravel()
    masks = (128 >> place % 8 if field.bit_order == "big" else 1 << place % 8).astype(np.uint8)
    bits = tf.cast(tf.bitwise.bitwise_and(tf.gather(stored, place // 8, axis=1), masks), tf.bool)
    values = tf.cast(bits, field.dtype)
    if field.scale is not None:
        values *= tf.cast(np.tile(field.channel_scale, cells), field.dtype)
    return tf.reshape(values, [-1, *field.shape])


def steps(config: Config) -> Iterator[Step]:
    return consume(decoded(config, decoder(config, _unpack)), config)
