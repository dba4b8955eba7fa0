"""minigo's training data: ZLIB-compressed TFRecord shards, as tensorflow/minigo, preprocessing.py, writes them."""

from __future__ import annotations

from collections.abc import Sequence

from loaderd.schema import Array, Float, Raw, Schema
from loaderd.schema.features import check_integer
from loaderd.schemas.symmetry import has_any, with_symmetries


def minigo(board_size: int = 19, num_planes: int = 17, symmetries: Sequence[int] = ()) -> Schema:
    """Fields, all float32: ``planes`` (19, 19, 17), ``policy`` (362,) and ``outcome`` ().

    Reads the features ``x`` (uint8), ``pi`` (float32 as bytes) and ``outcome`` (float). ``symmetries``: some of 0…7,
    as ``loaderd.board_symmetry`` numbers them: planes and policy of each record are turned by one of these, drawn
    anew in each epoch from the stream "symmetry". Empty: as stored.
    """
    board_size = check_integer(board_size, "minigo: board_size", 1, 255)
    num_planes = check_integer(num_planes, "minigo: num_planes", 1, 65_535)
    shape = (board_size, board_size, num_planes)
    schema = Schema(
        features={
            "x": Raw("uint8", shape),
            "pi": Raw("float32", (board_size * board_size + 1,)),
            "outcome": Float(),
        },
        fields={
            "planes": Array("x", "uint8" if has_any(symmetries) else "float32"),  # turning bytes takes half the time
            "policy": Array("pi"),
            "outcome": Array("outcome"),
        },
    )
    return with_symmetries(schema, ("planes", "policy"), symmetries, layout="NHWC") if has_any(symmetries) else schema
