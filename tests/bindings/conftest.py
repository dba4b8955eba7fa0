"""TensorFlow with two logical CPU devices, so that copies from one device to another can be tested without a GPU.

This can be said only before TensorFlow is used: here it is said while tests are collected, before any is run.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def mirrored() -> tf.distribute.Strategy:
    """Two replicas on the two CPUs. Of two such strategies in one process, TensorFlow confuses the collectives."""
    return tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
