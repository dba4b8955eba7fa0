"""Devices that batches can be copied to."""

from __future__ import annotations

import time
from collections.abc import Iterable

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
        spec = tf.DeviceSpec.from_string(name)
        if wanted is not None and (wanted.device_type, wanted.device_index or 0) == (
            spec.device_type,
            spec.device_index,
        ):
            return
    raise OptionError(
        f"device must be one of {present}, got {device!r}", hint="TensorFlow sees no other device here."
    )


def copy_ns(specs: Iterable[tf.TensorSpec], batch_size: int, device: str) -> int:
    """Nanoseconds that a copy of a batch of such fields to ``device`` takes when the device has nothing else to do.

    TensorFlow's own prefetching does not tell. 0 in a graph of TensorFlow 1, where nothing can be tried.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return 0
        with tf.device("/CPU:0"):
            # Text stays on the host. Ones, because the host gives zeros no memory until they are read.
            fields = [tf.ones([batch_size, *spec.shape[1:]], spec.dtype) for spec in specs if spec.dtype != tf.string]
        took_ns = []
        for _ in range(2):  # the first copy readies the device
            began_ns = time.perf_counter_ns()
            with tf.device(device):
                copies = [tf.identity(field) for field in fields]
            took_ns.append(time.perf_counter_ns() - began_ns)
            del copies
    return took_ns[-1]


def has_gpu() -> bool:
    """Whether TensorFlow has a GPU. False in a graph of TensorFlow 1, where to ask would take the GPU's memory."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions() and tf.config.list_logical_devices("GPU"))


def is_host(device: str) -> bool:
    """Whether ``device``, which must exist, is the first CPU: its memory is the host's own."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type == "CPU" and not spec.device_index
