"""loaderd for TensorFlow: a loader as a ``tf.data.Dataset``."""

try:
    import tensorflow as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    from loaderd.errors import install_hint

    raise ModuleNotFoundError(
        f"loaderd_tf needs TensorFlow: {install_hint('tensorflow')}, or 'tensorflow[and-cuda]' for a GPU",
        name="tensorflow",
    ) from None

from loaderd_tf.callbacks import BackupAndRestore
from loaderd_tf.distribute import distribute
from loaderd_tf.eager import batches
from loaderd_tf.parse_features import schema_from_features
from loaderd_tf.tensorboard import TensorBoard
from loaderd_tf.tf_dataset import from_loader, make_dataset
from loaderd_tf.unpack import Unpack, packed_schema, unpack

__all__ = [
    "BackupAndRestore",
    "TensorBoard",
    "Unpack",
    "batches",
    "distribute",
    "from_loader",
    "make_dataset",
    "packed_schema",
    "schema_from_features",
    "unpack",
]


def __dir__() -> list[str]:
    return __all__
