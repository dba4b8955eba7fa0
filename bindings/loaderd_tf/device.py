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
    except ValueError:
        wanted = None
    for name in present:
        found = tf.DeviceSpec.from_string(name)
        if wanted is not None and (wanted.device_type, wanted.device_index or 0) == (
            found.device_type,
            found.device_index,
        ):
            return
    raise OptionError(
        f"device must be one of {present}, got {device!r}", hint="TensorFlow sees no other device here."
    )


def is_host(device: str) -> bool:
    """Whether this device, which there is, has the host's own memory."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type == "CPU" and not spec.device_index
