"""Sparse fields: numpy and the loop make what a plain loop over bits makes, or name what is damaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import PackedBits, PrefixCodes, Raw, Schema, Sparse, Spread, packed_schema
from tests.helpers.decoding import decoded, rows_of
from tests.helpers.guarded import guarded


def plainly(field: Sparse, board: bytes, codes: bytes, bucket: int) -> list[int] | str:
    """The indices of a record; or, as text, what is wrong with it."""
    table = field.full_table if field.table is not None else np.arange(8 * len(board) - field.start)[None, None]
    squares, pieces = table.shape[2], []
    num_bits = squares if field.codes else table.shape[1] * squares
    for number in range(num_bits):
        byte, bit = divmod(field.start + number, 8)
        if not board[byte] >> (bit if field.bit_order == "little" else 7 - bit) & 1:
            continue
        code, square = divmod(number, squares)
        if field.codes:
            half, low = divmod(len(pieces), 2)
            if half >= len(codes):
                return "pieces, as there are codes"
            code = codes[half] >> 4 * (low if field.bit_order == "little" else 1 - low) & 15
        pieces.append((code, square))
    if field.bucket is None:
        bucket = 0
    elif isinstance(field.bucket, int):
        kings = [square for code, square in pieces if code == field.bucket]
        if not kings:
            return "whose square is the bucket, found none"
        bucket = kings[0]
    elif bucket >= len(table):
        return f"expected a bucket from 0 to {len(table) - 1}, found {bucket}"
    indices = [int(table[bucket, code, square]) for code, square in pieces]
    if -2 in indices:
        return "a piece that the table has, found one of code"
    kept = [index for index in indices if index >= 0]
    return kept if len(kept) <= field.k else f"expected at most {field.k} indices, found {len(kept)}"


@st.composite
def sparse_fields(draw: st.DrawFn) -> tuple[Sparse, int]:
    """With the number of its feature's bits."""
    has_codes, bucket = draw(st.booleans()), draw(st.sampled_from([None, "bucket", 0, 2]))
    squares, planes = draw(st.integers(1, 81)), draw(st.integers(3, 16))
    buckets = [] if bucket is None else [draw(st.integers(1, 9))] if bucket == "bucket" else [squares]
    start = draw(st.integers(0, 20))
    least = draw(st.sampled_from([-2, -1, 0]))
    table = np.random.default_rng(draw(st.integers(0, 99))).integers(least, 32767, (*buckets, planes, squares))
    if least == -2:  # but few: else hardly a record is whole
        table[table == -2] = -1
        table[..., -1, -1] = -2
    field = Sparse(
        "board",
        draw(st.integers(1, 40)),
        None if bucket is None and not has_codes and draw(st.booleans()) else table,
        "codes" if has_codes else None,
        bucket,
        start,
        draw(st.sampled_from(["big", "little"])),
        draw(st.sampled_from(["int16", "int32", "int64"])),
        count=draw(st.booleans()),
    )
    size = start + squares * (1 if has_codes else planes)
    return field, -(-size // 8) * 8


@given(
    sparse=sparse_fields(),
    share=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    code_bytes=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_any_record(kernels: str, sparse: tuple[Sparse, int], share: float, code_bytes: int, seed: int):
    field, num_bits = sparse
    features = {"codes": Raw("u1", (code_bytes,)), "bucket": Raw("u1"), "board": PackedBits(num_bits)}
    schema, rng, n = Schema(features, {"x": field}), np.random.default_rng(seed), 5
    rows = rows_of(
        schema,
        board=np.packbits(rng.random((n, num_bits)) < share, axis=1),
        codes=rng.integers(0, 256, (n, code_bytes)) & 0x77,
        bucket=rng.integers(0, 10, n),
    )
    rows = guarded(rows.tobytes()).reshape(rows.shape)
    stored = rows.view(schema.row_dtype)[:, 0]
    decoder, spec = BatchDecoder(schema), schema.specs["x"]
    assert decoder.kernels == kernels
    whole = []
    for number in range(n):
        expected = plainly(
            field, *(stored[name][number].tobytes() for name in ("board", "codes")), stored["bucket"][number]
        )
        out = guarded(bytes(spec.record_bytes)).view(spec.dtype).reshape(1, *spec.shape)
        if isinstance(expected, str):
            with pytest.raises(WorkerError, match=expected):
                decoder.decode(rows[number : number + 1], {"x": out})
            continue
        padded = len(expected) if field.count else expected + [-1] * (field.k - len(expected))
        decoder.decode(rows[number : number + 1], {"x": out})
        assert out[0].tolist() == padded
        whole.append((number, padded))
    some = np.ascontiguousarray(rows[[number for number, _ in whole]])
    out = np.empty((len(whole), *spec.shape), spec.dtype)
    decoder.decode(some, {"x": out})
    assert out.tolist() == [padded for _, padded in whole]
    if len(whole) < n:  # the records before the damaged one are no excuse
        with pytest.raises(WorkerError, match="field 'x': expected"):
            decoder.decode(rows, {"x": np.empty((n, *spec.shape), spec.dtype)})


@given(
    sparse=sparse_fields(),
    k=st.integers(1, 40),
    share=st.sampled_from([0.03, 0.1, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_workers_find_the_records_that_a_device_could_not(
    kernels: str, sparse: tuple[Sparse, int], k: int, share: float, seed: int
):
    """Fields that read the same pieces are checked together: the same records are refused, in the same words."""
    (field, num_bits), rng, n = sparse, np.random.default_rng(seed), 5
    table = None if field.table is None else np.where(rng.random(field.table.shape) < 0.1, -1, field.table[..., ::-1])
    features = {"codes": Raw("u1", (20,)), "bucket": Raw("u1"), "board": PackedBits(num_bits)}
    fields = {"x": field, "y": replace(field, table=table, k=k, count=not field.count)}
    rows = rows_of(
        Schema(features, fields),
        board=np.packbits(rng.random((n, num_bits)) < share, axis=1),
        codes=rng.integers(0, 256, (n, 20)) & 0x77,
        bucket=rng.integers(0, 10, n),
    )

    def faults(schema: Schema) -> list[str]:
        texts = []
        for number in range(n):
            try:
                decoded(schema, rows[number : number + 1])
            except WorkerError as error:
                texts.append(error.message)
            else:
                texts.append("")
        return texts

    for names in ("xy", "yx"):
        schema = Schema(features, {name: fields[name] for name in names})
        packed = packed_schema(schema, for_device=True)
        assert faults(packed) == faults(schema)
        if not any(faults(schema)):
            decoded(packed, rows)


@st.composite
def coded_fields(draw: st.DrawFn) -> tuple[Sparse, int]:
    """Of prefix codes: one in four is no code. With the number of their feature's bits."""
    places, order = (
        draw(st.integers(2, 40) | st.sampled_from([64, 81, 128])),
        draw(st.sampled_from(["big", "little"])),
    )
    fixed = draw(st.sampled_from([[], [(0, 3, 3)], [(0, 2, 3), (2, 3, 0)]]))
    ranks = draw(st.none() | st.permutations(range(places)))
    codes = PrefixCodes("board", ["0", "10", "110", None], places, start=6, fixed=fixed, bit_order=order, order=ranks)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    bucket = draw(st.sampled_from([None, "bucket", 3, 1]))
    buckets = [] if bucket is None else [4] if bucket == "bucket" else [places]
    table = rng.integers(-1, 32767, (*buckets, 4, places))
    table[..., 0, :] = draw(st.sampled_from([-1, 5]))
    if draw(st.booleans()):
        table[..., 2, -1] = -2
    dtype, count = draw(st.sampled_from(["int16", "int32", "int64"])), draw(st.booleans())
    field = Sparse(codes, draw(st.integers(1, 50)), table, bucket=bucket, dtype=dtype, count=count)
    return field, draw(st.integers(6 + places, 6 + 3 * places))


def indices_of_symbols(field: Sparse, symbols: list[int], bucket: int) -> list[int] | str:
    """As ``plainly``."""
    if isinstance(field.bucket, int):
        if field.bucket not in symbols:
            return "whose square is the bucket, found none"
        bucket = symbols.index(field.bucket)
    elif field.bucket is None:
        bucket = 0
    elif bucket > 3:
        return f"expected a bucket from 0 to 3, found {bucket}"
    table = field.table if field.bucket is not None else field.table[None]
    indices = [int(table[bucket, symbol, place]) for place, symbol in enumerate(symbols)]
    if -2 in indices:
        return "a piece that the table has, found one of code 2"
    kept = [index for index in indices if index >= 0]
    return kept if len(kept) <= field.k else f"expected at most {field.k} indices, found {len(kept)}"


@given(sparse=coded_fields(), share=st.sampled_from([0.1, 0.3]), seed=st.integers(0, 2**32))
def test_symbols_of_prefix_codes(kernels: str, sparse: tuple[Sparse, int], share: float, seed: int):
    """``tests/decode/test_codes.py`` looks at the symbols."""
    (field, num_bits), rng, n = sparse, np.random.default_rng(seed), 6
    assert isinstance(field.feature, PrefixCodes)
    features = {"bucket": Raw("u1"), "board": PackedBits(num_bits)}
    schema, symbols = Schema(features, {"x": field}), Schema(features, {"x": field.feature})
    order = field.feature.bit_order
    board = np.packbits(rng.random((n, num_bits)) < share, axis=1, bitorder=order)  # type: ignore[call-overload]
    rows = rows_of(schema, board=board, bucket=rng.integers(0, 5, n))
    rows = guarded(rows.tobytes()).reshape(rows.shape)
    decoder, spec, whole = BatchDecoder(schema), schema.specs["x"], []
    for number in range(n):
        row, out = rows[number : number + 1], np.empty((1, *spec.shape), spec.dtype)
        found = np.empty((1, field.feature.num_places), np.uint8)
        expected: list[int] | str = "field 'x': expected"
        try:
            BatchDecoder(symbols).decode(row, {"x": found})
            expected = indices_of_symbols(field, found[0].tolist(), int(row.view(schema.row_dtype)["bucket"][0, 0]))
        except WorkerError:
            pass
        if isinstance(expected, str):
            with pytest.raises(WorkerError, match=expected):
                decoder.decode(row, {"x": out})
            continue
        padded = len(expected) if field.count else expected + [-1] * (field.k - len(expected))
        decoder.decode(row, {"x": out})
        assert out[0].tolist() == padded
        whole.append((number, padded))
    out = np.empty((len(whole), *spec.shape), spec.dtype)
    decoder.decode(np.ascontiguousarray(rows[[number for number, _ in whole]]), {"x": out})
    assert out.tolist() == [padded for _, padded in whole]


CODES = PrefixCodes("b", ["0", "10"], 3)
FEATURES = {"b": PackedBits(64), "c": Raw("u1", (16,)), "k": Raw("u1"), "w": Raw("<u2")}
TABLE = np.zeros((12, 64), int)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sparse("b", 0), "Sparse: k must be a positive integer, got 0"),
        (lambda: Sparse("b", 1, dtype="uint16"), "Sparse: dtype must be int16, int32 or int64, got uint16"),
        (lambda: Sparse("b", 1, [[0.5]]), "Sparse: table must be an array of 4194304 integers at most"),
        (lambda: Sparse("b", 1, [[1], [1, 2]]), "Sparse: table must be an array of"),
        (lambda: Sparse("b", 1, []), "Sparse: table must be an array of"),
        (lambda: Sparse("b", 1, [-3]), "must hold indices from 0 to 2147483647, -1 or -2, got -3"),
        (lambda: Sparse("b", 1, [1 << 15], dtype="int16"), "indices from 0 to 32767, -1 or -2, got 32768"),
        (lambda: Sparse("b", 1, [1 << 31], dtype="int64"), "from 0 to 2147483647, -1 or -2, got 2147483648"),
        (lambda: Sparse("b", 1, [(1 << 64) - 1]), "must be of integers that int64 holds, got 18446744073709551615"),
        (
            lambda: Sparse("b", 1 << 15, count=True, dtype="int16"),
            "dtype must hold the number of up to 32768 indices",
        ),
        (lambda: Sparse(CODES, 1), "Sparse: PrefixCodes need a table"),
        (lambda: Sparse(CODES, 1, [[0, 1, 2]]), "PrefixCodes have 2 symbols and 3 places, got shape"),
        (lambda: Sparse(CODES, 1, TABLE[:2, :3], "c"), "PrefixCodes must have values, dtype and end as they are by"),
        (lambda: Sparse(CODES, 1, TABLE[:2, :3], bit_order="little"), "no codes, start or bit_order beside them"),
        (lambda: Sparse(replace(CODES, values=[1, 0]), 1, TABLE[:2, :3]), "must have values, dtype and end as they"),
        (lambda: Sparse(replace(CODES, feature="k"), 1, TABLE[:2, :3]), "feature 'k' must be PackedBits, got Raw"),
        (lambda: Sparse("b", 1, codes="c"), "Sparse: codes and a bucket need a table"),
        (lambda: Sparse("b", 1, np.zeros(64, int), "c"), r"must have the axes \(code, square\), got shape \(64,\)"),
        (lambda: Sparse("b", 1, TABLE[None]), r"must have the axes \(code, square\), got shape \(1, 12, 64\)"),
        (lambda: Sparse("b", 1, np.zeros((17, 64), int), "c"), "must be for 16 codes at most, got 17"),
        (lambda: Sparse("b", 1, np.zeros((8, 12, 64), int), "c", bucket=5), "as many buckets as squares"),
        (lambda: Sparse("b", 1, bucket=b"k"), "Sparse: bucket must be an integer from 0 on"),
        (lambda: Sparse("b", 1, count=1), "Sparse: count must be True or False"),
        (lambda: Sparse("b", 1, start=64), "field 'x' needs bits 64…64 of feature 'b', which has 64"),
        (lambda: Sparse("b", 1, TABLE), "field 'x' needs bits 0…767 of feature 'b', which has 64"),
        (lambda: Sparse("k", 1), "field 'x': feature 'k' must be PackedBits, got Raw"),
        (lambda: Sparse("b", 1, TABLE, "w"), "which codes names, must be PackedBits, or a Raw of uint8, got Raw"),
        (lambda: Sparse("b", 1, [TABLE], "c", "c"), "which bucket names, must be a Raw of one uint8, got Raw"),
        (lambda: Sparse("b", 1, TABLE, "d"), "field 'x' reads feature 'd', which is none of"),
    ],
)
def test_what_cannot_be(make: Any, text: str):
    with pytest.raises(SchemaError, match=text):
        Schema(FEATURES, {"x": make()})


def test_it_is_shown_without_the_numbers_of_its_table_and_equal_by_them():
    field = Sparse("b", 32, TABLE, codes="c", dtype="int16")
    assert repr(field) == "Sparse(feature='b', k=32, table=<int64 (12, 64)>, codes='c', dtype=dtype('int16'))"
    assert field == Sparse("b", 32, TABLE.tolist(), codes="c", dtype="<i2") != Sparse("b", 32, TABLE + 1, codes="c")
    assert Schema(FEATURES, {"x": field}) != Schema(FEATURES, {"x": Spread("k", ())})
