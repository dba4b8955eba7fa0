"""loaderd for TensorFlow: a loader as a ``tf.data.Dataset``."""

from loaderd_tf.callbacks import BackupAndRestore
from loaderd_tf.dataset import from_loader, make_dataset, schema_from_features
from loaderd_tf.distribute import distribute
from loaderd_tf.unpack import Unpack, packed_schema, unpack

__all__ = [
    "BackupAndRestore",
    "Unpack",
    "distribute",
    "from_loader",
    "make_dataset",
    "packed_schema",
    "schema_from_features",
    "unpack",
]
