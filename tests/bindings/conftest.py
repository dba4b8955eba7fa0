"""TensorFlow with two logical CPU devices, so that copies from one device to another can be tested without a GPU."""

from __future__ import annotations

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="session")
def _two_devices() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
