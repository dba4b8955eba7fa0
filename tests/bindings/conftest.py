"""TensorFlow with two logical CPU devices, so that copies from one device to another can be tested without a GPU.

This can be said only before TensorFlow is used: here it is said while tests are collected, before any is run.
"""

from __future__ import annotations

import tensorflow as tf

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)
