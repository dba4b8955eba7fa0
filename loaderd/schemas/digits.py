"""Handwritten digits, as TensorFlow's example ``convert_to_records.py`` wrote them."""

from __future__ import annotations

from loaderd.schema import Array, Int64, Raw, Schema


def mnist() -> Schema:
    """MNIST as TensorFlow's old converter wrote it: ``image`` float32 (28, 28, 1) in ±0.5, ``label`` int32 ().

    Reads the features ``image_raw`` (784 bytes) and ``label`` (int64); image = stored · 1/255 - 0.5.
    """
    return Schema(
        features={"image_raw": Raw("uint8", (28, 28, 1)), "label": Int64()},
        fields={
            "image": Array("image_raw", dtype="float32", scale=1.0 / 255.0, offset=-0.5),
            "label": Array("label", dtype="int32"),
        },
    )
