"""TensorFlow with two logical CPU devices, so that copies from one device to another can be tested without a GPU.

This can be said only before TensorFlow is used: here it is said while tests are collected, before any is run. And
the server's helper modules are put on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)
