"""What an element of a data set looks like, and how many TensorFlow takes ahead: checked before anything runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import loaderd
from loaderd.client.elements import Structure, checked_structure
from loaderd.options import as_count, require
from loaderd_tf.device import check_device


def check_element(structure: Structure, prefetch: Any, device: Any, schema: loaderd.Schema) -> tuple[Structure, int]:
    """The structure (as tf.data takes it) and ``prefetch``, checked; so is ``device``. Raises OptionError."""
    if device is not None:
        check_device(device)
    require(
        not isinstance(prefetch, int) or prefetch != tf.data.AUTOTUNE,
        "prefetch",
        "a number of batches, 0 or more",
        prefetch,
        "AUTOTUNE has nothing to tune here: the workers are ahead by batches of their own, and the default will do.",
    )
    prefetch = as_count(prefetch, "prefetch", "a number of batches, 0 or more", 0)
    return _without_lists(checked_structure(structure, schema)), prefetch


def _without_lists(part: Structure) -> Structure:
    """``part`` with tuples in place of lists, which tf.data would take for tensors."""
    if isinstance(part, dict):
        return {key: _without_lists(inner) for key, inner in part.items()}
    if isinstance(part, (list, tuple)):
        parts = tuple(_without_lists(inner) for inner in part)
        return type(part)(*parts) if hasattr(part, "_fields") else parts
    return part
