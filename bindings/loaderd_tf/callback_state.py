"""What Keras's callbacks remember from one epoch to the next, for :class:`loaderd_tf.BackupAndRestore`.

Keras makes them forget it when ``fit`` begins. So after a crash, EarlyStopping would have all of its patience again,
and ModelCheckpoint would overwrite a better checkpoint. The best weights of EarlyStopping are variables of the
backup; all else is small, and part of its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("best", "wait", "stopped_epoch", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}


def callback_states(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, dict[str, Any]]:
    """The state of each callback that has one, by its name, as JSON can hold it."""
    return {
        name: {key: _plain(getattr(callback, key)) for key in attributes if hasattr(callback, key)}
        for name, callback, attributes in _with_state(callbacks)
    }


def save_best_weights(callbacks: Sequence[keras.callbacks.Callback], checkpoint: tf.train.Checkpoint) -> None:
    """Have ``checkpoint`` hold the best weights of each EarlyStopping that has some."""
    for name, callback, _ in _with_state(callbacks):
        weights = getattr(callback, "best_weights", None)
        if weights is not None:
            setattr(checkpoint, _weights_name(name), [tf.Variable(each, trainable=False) for each in weights])


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], states: Mapping[str, Mapping[str, Any]], checkpoint: str
) -> None:
    """Give the callbacks the states of an earlier training, and the best weights that ``checkpoint``, a path, holds.

    One that was not there then begins anew.
    """
    reader = tf.train.load_checkpoint(checkpoint)
    variables = reader.get_variable_to_shape_map()
    for name, callback, _ in _with_state(callbacks):
        for key, value in states.get(name, {}).items():
            setattr(callback, key, value)
        keys = (f"{_weights_name(name)}/{number}/.ATTRIBUTES/VARIABLE_VALUE" for number in range(len(variables)))
        weights = [reader.get_tensor(key) for key in keys if key in variables]
        if weights:
            callback.best_weights = weights


def _with_state(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback, tuple[str, ...]]]:
    """Each callback that has a state, with a name that it has in each run of the program, and its attributes."""
    names: list[str] = []
    for callback in callbacks:
        for kind, attributes in _ATTRIBUTES.items():
            if isinstance(callback, kind):
                name = f"{kind.__name__}_{callback.monitor}"
                names.append(name)
                yield f"{name}_{names.count(name)}", callback, attributes


def _weights_name(name: str) -> str:
    return "best_weights_" + "".join(each if each.isalnum() else "_" for each in name)


def _plain(value: Any) -> Any:
    """A number of numpy's or TensorFlow's as one of Python's."""
    return value if value is None else np.asarray(value).item()
