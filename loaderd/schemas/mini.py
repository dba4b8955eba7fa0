"""minigo's training data: TFRecord shards, ZLIB, of Examples, as tensorflow/minigo, preprocessing.py, writes them."""

from __future__ import annotations

from loaderd.schema import Array, Float, Raw, Schema


def minigo(board_size: int = 19, num_planes: int = 17) -> Schema:
    """Fields, all float32: ``planes`` (19, 19, 17), ``policy`` (362,) and ``outcome`` ().

    Reads the features ``x`` (uint8), ``pi`` (float32 as bytes) and ``outcome`` (float).
    """
    shape = (board_size, board_size, num_planes)
    return Schema(
        features={
            "x": Raw("uint8", shape),
            "pi": Raw("float32", (board_size * board_size + 1,)),
            "outcome": Float(),
        },
        fields={"planes": Array("x", "float32"), "policy": Array("pi"), "outcome": Array("outcome")},
    )
