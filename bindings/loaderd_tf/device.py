"""Devices that batches can be copied to."""

from __future__ import annotations

import tensorflow as tf

from loaderd.errors import OptionError
from loaderd.options import require


def check_device(device: str) -> None:
    """Raise OptionError unless TensorFlow has this device here and now."""
    require(isinstance(device, str), "device", 'text such as "/GPU:0"', device)
    present = [logical.name for logical in tf.config.list_logical_devices()]
    try:
        wanted = tf.DeviceSpec.from_string(device)
        is_present = f"/device:{wanted.device_type}:{wanted.device_index or 0}" in present
    except ValueError:
        is_present = False
    if not is_present:
        raise OptionError(
            f"device must be one of {present}, got {device!r}", hint="TensorFlow sees no other device here."
        )


def has_gpu() -> bool:
    """Whether TensorFlow has a GPU. False in a graph of TensorFlow 1, where to ask would take the GPU's memory."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions() and tf.config.list_logical_devices("GPU"))


def is_host(device: str) -> bool:
    """Whether ``device``, which must exist, is the first CPU: its memory is the host's own."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type == "CPU" and not spec.device_index
