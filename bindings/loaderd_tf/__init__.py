"""loaderd for TensorFlow: a loader as a ``tf.data.Dataset``."""

from loaderd_tf.dataset import from_loader, make_dataset, schema_from_features

__all__ = ["from_loader", "make_dataset", "schema_from_features"]
