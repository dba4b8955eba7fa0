"""tf.data with the unpacking compiled by XLA: the bit arithmetic becomes one fused, vectorised loop.

Each of a square's 24 output values picks one of its three bytes and one bit of it, by constants. XLA compiles
anew for each batch size it meets: once, and once more for a short batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loaderd.bench.interface import Config, Step
from loaderd.bench.reference import CHANNEL_ORDER, CHANNEL_SIGN
from loaderd_tf.bench._tfdata import consume, decoded, flags_and_score

_BYTE = CHANNEL_ORDER // 8
_SHIFT = (7 - CHANNEL_ORDER % 8).astype(np.int32)


@tf.function(jit_compile=True)
def _decode(stored: tf.Tensor, scores: tf.Tensor) -> Any:
    squares = tf.cast(tf.reshape(stored[:, :192], [-1, 64, 3]), tf.int32)
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(tf.gather(squares, _BYTE, axis=-1), _SHIFT), 1)
    board = tf.reshape(tf.cast(bits, tf.float32) * CHANNEL_SIGN, [-1, 8, 8, 24])
    flags, score = flags_and_score(stored, scores)
    return {"board": board, "flags": flags, "score": score}


def steps(config: Config) -> Iterator[Step]:
    return consume(decoded(config, _decode), config)
