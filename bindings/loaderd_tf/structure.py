"""What an element looks like, and the device that it goes to: checked before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import loaderd
from loaderd.client.elements import Structure, checked_prefetch, checked_structure, field_names
from loaderd.errors import OptionError
from loaderd.options import require


def check_element(structure: Structure, prefetch: Any, device: Any, schema: loaderd.Schema) -> tuple[Structure, int]:
    """The structure (as tf.data takes it), and how many batches to copy ahead. Raises OptionError."""
    if device is not None:
        check_device(device)
    require(
        not isinstance(prefetch, int) or prefetch != tf.data.AUTOTUNE,
        "prefetch",
        "a number of batches, 0 or more",
        prefetch,
        "AUTOTUNE has nothing to tune here: the workers are ahead by batches of their own, and the default will do.",
    )
    ahead = checked_prefetch(prefetch, device)
    structure = _without_lists(checked_structure(structure, schema))
    for name in field_names(structure):
        check_dtype(name, schema.specs[name].dtype)
    return structure, ahead


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise OptionError unless TensorFlow has this dtype."""
    try:
        tf.as_dtype(dtype)
    except TypeError:
        raise OptionError(
            f"fields must be of dtypes that TensorFlow has, got field {name!r} of {dtype}",
            hint="Leave it out: give a structure of the other fields; or give it another dtype in the schema.",
        ) from None


def _without_lists(part: Structure) -> Structure:
    """``part`` with tuples in place of lists, which tf.data would take for tensors."""
    if isinstance(part, dict):
        return {key: _without_lists(inner) for key, inner in part.items()}
    if isinstance(part, (list, tuple)):
        parts = tuple(_without_lists(inner) for inner in part)
        return type(part)(*parts) if hasattr(part, "_fields") else parts
    return part


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
