"""Boards as bulletformat has them, and codes; files of these, and what Sparse, Codes and others make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import loaderd

DTYPE = np.dtype(
    [
        *(("occupied", "u1", (8,)), ("pieces", "u1", (16,)), ("number", "<i4"), ("king", "u1")),
        *(
            ("bases", "u1", (4,)),
            ("huffman", "u1", (4,)),
            ("moves", "<i2", (5,)),
            ("chances", "<f2", (5,)),
            ("x", "u1"),
        ),
    ]
)
HUFFMAN = loaderd.PrefixCodes("huffman", ["0", "10", "11"], 16)
SYMBOL_TABLE = np.arange(64 * 3 * 16).reshape(64, 3, 16)
SYMBOL_TABLE[:, 0] = -1
COLOURS, TYPES, SQUARES = 2, 6, np.arange(64)


def chess768() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """int, (16, 64) each: the indices of a piece for the side to move, and for the other one."""
    own, other = np.full((2, 16, 64), -2)
    for colour in range(COLOURS):
        for kind in range(TYPES):
            own[8 * colour + kind] = 384 * colour + 64 * kind + SQUARES
            other[8 * colour + kind] = 384 * (1 - colour) + 64 * kind + (SQUARES ^ 56)
    return own, other


def with_buckets() -> npt.NDArray[Any]:
    """int, (64, 16, 64): by the king's square, one of four buckets, mirrored where it is on the right."""
    mirror = np.where(SQUARES % 8 > 3, 7, 0)
    bucket = SQUARES // 32 * 2 + (SQUARES % 8 ^ mirror) // 2
    own = chess768()[0]
    tables = own[:, SQUARES[None] ^ mirror[:, None]].transpose(1, 0, 2)
    return np.where(tables < 0, -2, tables + 768 * bucket[:, None, None])


def schema() -> loaderd.Schema:
    own, other = chess768()
    of = {"feature": "occupied", "codes": "pieces", "bit_order": "little", "k": 32}
    return loaderd.Schema(
        loaderd.FixedRecords(DTYPE[list(DTYPE.names or ())[:-1]], bits=["occupied", "pieces", "bases", "huffman"]),
        {
            "own": loaderd.Sparse(table=own, dtype="int16", **of),
            "other": loaderd.Sparse(table=other, **of),
            "count": loaderd.Sparse(table=own, count=True, **of),
            "by king": loaderd.Sparse(table=with_buckets(), bucket="king", **of),
            "by piece": loaderd.Sparse(table=with_buckets(), bucket=5, **of),
            "squares": loaderd.Sparse("occupied", 40, bit_order="little"),
            "bases": loaderd.Codes("bases", 2, 16, np.eye(4)),
            "symbols": HUFFMAN,
            "of symbols": loaderd.Sparse(HUFFMAN, 16, SYMBOL_TABLE, bucket="king", dtype="int16"),
            "policy": loaderd.Scatter("moves", "chances", 40),
            "one hot": loaderd.OneHot("king", 64, dtype="int8"),
            "number": loaderd.Array("number", "int32"),
        },
    )


def boards(count: int) -> npt.NDArray[np.void]:
    """Each with the two kings and up to 30 other pieces."""
    records, rng = np.zeros(count, DTYPE), np.random.default_rng(count)
    for number, record in enumerate(records):
        squares = np.sort(rng.permutation(64)[: rng.integers(2, 33)])
        codes = rng.choice([0, 1, 2, 3, 4, 8, 9, 10, 11, 12], 32)
        codes[len(squares) :] = 0
        codes[rng.permutation(len(squares))[:2]] = [5, 13]
        record["occupied"] = np.packbits(np.isin(SQUARES, squares), bitorder="little")
        record["pieces"] = codes[::2] | codes[1::2] << 4
        record["number"], record["king"] = number, squares[codes[: len(squares)] == 5][0]
    records["bases"], records["huffman"] = (rng.integers(0, 256, (count, 4)) for _ in range(2))
    records["moves"], records["chances"] = rng.integers(-1, 40, (count, 5)), rng.random((count, 5))
    return records


def damaged(records: npt.NDArray[np.void], number: int) -> None:
    """Have one of them 33 pieces."""
    records["occupied"][number] = [255, 255, 255, 255, 1, 0, 0, 0]


def write(path: Path, records: npt.NDArray[np.void]) -> Path:
    path.write_bytes(records.tobytes())
    return path


def expected(record: Any) -> dict[str, Any]:
    """The fields of one record, piece by piece."""
    pieces, codes = [], [code for byte in record["pieces"].tolist() for code in (byte & 15, byte >> 4)]
    for square in range(64):
        if record["occupied"][square // 8] >> square % 8 & 1:
            code = codes[len(pieces)]
            pieces.append((code >> 3, code & 7, square))
    king = int(record["king"])
    right = 7 if king % 8 > 3 else 0
    bucket = king // 32 * 2 + (king % 8 ^ right) // 2
    of_bucket = [768 * bucket + 384 * colour + 64 * kind + (square ^ right) for colour, kind, square in pieces]
    indices = {
        "own": [384 * colour + 64 * kind + square for colour, kind, square in pieces],
        "other": [384 * (1 - colour) + 64 * kind + (square ^ 56) for colour, kind, square in pieces],
        "by king": of_bucket,
        "by piece": of_bucket,
        "squares": [square for *_, square in pieces] + [-1] * 8,
    }
    policy = dict(zip(record["moves"].tolist(), record["chances"].tolist(), strict=True))
    base = [byte >> shift & 3 for byte in record["bases"].tolist() for shift in (6, 4, 2, 0)]
    bits, symbols = "".join(f"{byte:08b}"[::-1] for byte in record["huffman"].tolist()), []
    for _ in range(16):
        symbols.append(0 if bits[0] == "0" else 1 + int(bits[1]))
        bits = bits[1 if bits[0] == "0" else 2 :]
    of_symbols = [48 * king + 16 * symbol + place for place, symbol in enumerate(symbols) if symbol]
    others = {
        "of symbols": of_symbols + [-1] * (16 - len(of_symbols)),
        "bases": [[float(code == each) for code in range(4)] for each in base],
        "symbols": symbols,
        "policy": [policy.get(move, 0.0) for move in range(40)],
        "one hot": [int(square == king) for square in range(64)],
        "count": len(pieces),
        "number": int(record["number"]),
    }
    padded = {name: each + [-1] * (32 - len(pieces)) for name, each in indices.items()}
    return {**padded, **others}


def check(batches: Any, records: npt.NDArray[np.void]) -> None:
    """Each record comes once, with the values that it must have; ``batches``: name -> what numpy takes."""
    numbers = []
    for batch in batches:
        arrays = {name: np.asarray(batch[name]) for name in schema().fields}
        assert arrays["own"].dtype == np.int16 and arrays["other"].dtype == np.int32
        for place, number in enumerate(arrays["number"].tolist()):
            numbers.append(number)
            found = {name: values[place].tolist() for name, values in arrays.items()}
            assert found == expected(records[number])
    assert sorted(numbers) == records["number"].tolist()
