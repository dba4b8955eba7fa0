"""Every engine for bits must give exactly what unpacking them one by one gives: numpy's, and the compiled one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loaderd.decode.batch_decoder import layout_of
from loaderd.kernels.bits import ExpandBytes, GatherCodes, PickBits, SelectBits, bits_engine
from loaderd.schema import Bits
from loaderd.schemas import chess_eval
from tests.helpers.guarded import guarded

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "bool", "int32", "int64", ">f4"]
Rows = npt.NDArray[np.uint8]
pytestmark = pytest.mark.usefixtures("kernels")


def reference(field: Bits, feature_offset: int, rows: Rows) -> npt.NDArray[Any]:
    """The definition of a Bits field, word for word."""
    bits = np.unpackbits(rows[:, feature_offset:], axis=1, bitorder=field.bit_order)[:, field.start :]  # type: ignore[call-overload]
    if field.plane_bytes is not None:
        planes = [bits[:, 8 * field.plane_bytes * plane :][:, : field.plane_bits] for plane in range(field.shape[0])]
        bits = np.concatenate(planes, axis=1)
    stored = bits[:, : field.num_bits].reshape(len(rows), -1, field.num_channels)
    scale = np.array([float(s) for s in field.channel_scale]).astype(field.dtype)
    values = np.zeros(stored.shape, field.dtype)
    for channel, source in enumerate(field.order):
        values[..., channel][stored[..., source] == 1] = scale[channel]
    return values.reshape(len(rows), *field.shape)


def bytes_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """To tell 0 from -0 and to find NaN equal to itself."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def random_rows(num_records: int, row_bytes: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (num_records, row_bytes), dtype=np.uint8)


def decode_guarded(field: Bits, feature_offset: int, rows: Rows) -> npt.NDArray[Any]:
    """Decode into the middle of a buffer, and check that the engine leaves the rest of it alone."""
    size = len(rows) * field.num_bits * field.dtype.itemsize
    buffer = np.full(64 + size + 64, 0xA5, np.uint8)
    out = buffer[64 : 64 + size].view(field.dtype).reshape(len(rows), *field.shape)
    engine = bits_engine(layout_of(field, feature_offset))
    engine.reserve(len(rows))
    engine.decode(rows, out)
    assert set(buffer[:64]) == set(buffer[64 + size :]) == {0xA5}
    return out


def assert_exact(field: Bits, feature_offset: int, rows: Rows) -> None:
    found = decode_guarded(field, feature_offset, rows)
    assert np.array_equal(bytes_of(found), bytes_of(reference(field, feature_offset, rows)))


@st.composite
def bits_fields(draw: st.DrawFn) -> Bits:
    """Of up to 6,000 bits: some of one section, some of many and a rest, some in padded planes."""
    channels = draw(st.integers(1, 50) | st.sampled_from([6, 8, 12, 16, 24, 32]))
    places = st.integers(1, min(361, 6000 // channels)).map(lambda number: [number])
    outer = draw(st.lists(st.integers(1, 6), max_size=2) | places)
    shape = () if channels == 1 and not outer else (*outer, channels)
    dtype = draw(st.sampled_from(DTYPES))
    scales = {"bool": [0, 1], "uint8": [0, 1, 255], "int8": [-128, -1, 1, 127], "int64": [1, -3, 2**40]}.get(
        dtype, [-1, 1, 1, 3] if "int" in dtype else [-1.0, 1.0, 0.1, math.inf, -0.0, math.nan]
    )
    least_bytes = (math.prod(shape[1:]) + 7) // 8
    plane_bytes = draw(st.none() | st.integers(least_bytes, least_bytes + 3)) if len(shape) > 1 else None
    start = draw(st.sampled_from([0, 8, 64]) | st.integers(0, 70))
    order, turned = range(channels), draw(st.integers(0, channels - 1))
    return Bits(
        "d",
        shape=shape,
        start=start if plane_bytes is None else start // 8 * 8,
        channel_order=draw(
            st.sampled_from([None, order[::-1], (*order[turned:], *order[:turned])]) | st.permutations(order)
        ),
        scale=draw(
            st.none()
            | st.sampled_from(scales)
            | st.lists(st.sampled_from(scales), min_size=channels, max_size=channels)
        ),
        dtype=dtype,
        bit_order=draw(st.sampled_from(["big", "little"])),
        plane_bytes=plane_bytes,
    )


@example(field=Bits("d", (7, 8), plane_bytes=1), feature_offset=0, trailing_bytes=1, num_records=2, seed=0)
@example(field=Bits("d", (8, 16), plane_bytes=3), feature_offset=0, trailing_bytes=1, num_records=2, seed=0)
@given(
    field=bits_fields(),
    feature_offset=st.integers(0, 9),
    trailing_bytes=st.integers(1, 9),  # as Schema.row_dtype has it
    num_records=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_are_exact(
    kernels: str, field: Bits, feature_offset: int, trailing_bytes: int, num_records: int, seed: int
) -> None:
    row_bytes = feature_offset + -(-field.stop // 8) + trailing_bytes
    rows = guarded(random_rows(num_records, row_bytes, seed).tobytes()).reshape(num_records, row_bytes)
    assert_exact(field, feature_offset, rows)
    run_bits = field.num_bits if field.plane_bytes is None else field.num_channels
    steps = {(after - before) % field.num_channels for before, after in itertools.pairwise(field.order.tolist())}
    has_word = row_bytes - trailing_bytes + 1 >= 4  # only one byte behind the feature is sure to be there
    is_easy = run_bits >= 8 and has_word and field.num_channels <= 25 and len(steps) <= 1
    assert bits_engine(layout_of(field, feature_offset)).is_compiled or kernels == "numpy" or not is_easy


CHESS = chess_eval().fields["board"]
assert isinstance(CHESS, Bits)
REVERSED = tuple(reversed(range(24)))


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        pytest.param(GatherCodes, CHESS, id="chess board"),
        pytest.param(GatherCodes, Bits("d", (40, 16), 16, tuple(range(8, 16)) + tuple(range(8))), id="16 channels"),
        pytest.param(GatherCodes, Bits("d", (4, 10, 12), 0, (*range(1, 12), 0)), id="two pixels of 12 in a group"),
        pytest.param(ExpandBytes, Bits("d", (112, 8, 8)), id="planes of 8 by 8 (Leela)"),
        pytest.param(ExpandBytes, Bits("d", (10,), 1536), id="ten flags"),
        pytest.param(ExpandBytes, Bits("d", (64, 24), 3), id="start inside a byte"),
        pytest.param(ExpandBytes, Bits("d", (50, 4), 8, (3, 2, 1, 0), (1, 2, 3, 4)), id="order inside a byte"),
        pytest.param(PickBits, Bits("d", (64, 24), 4, REVERSED), id="order, start inside a byte"),
        pytest.param(PickBits, Bits("d", (5, 12), 0, (*range(1, 12), 0)), id="half a group at the end"),
        pytest.param(PickBits, Bits("d", (19, 19, 22), 0, (*range(1, 22), 0)), id="22 channels, reordered"),
    ],
)
def test_the_geometry_chooses_the_engine(engine: type, field: Bits, kernels: str) -> None:
    assert type(bits_engine(layout_of(field, 0))) is (SelectBits if kernels == "compiled" else engine)
    assert_exact(field, 0, random_rows(9, -(-(field.start + field.num_bits) // 8) + 1))


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        pytest.param(ExpandBytes, Bits("d", (), 1546, dtype="bool"), id="one bit"),
        pytest.param(ExpandBytes, Bits("d", (5,), 1, (4, 3, 2, 1, 0)), id="reversed inside a byte"),
        pytest.param(PickBits, Bits("d", (9, 9, 40), 0, (39, *range(39))), id="neighbours four bytes apart"),
        pytest.param(ExpandBytes, Bits("d", (8,)), id="a row of two bytes"),
    ],
)
def test_some_fields_are_left_to_numpy(engine: type, field: Bits) -> None:
    assert type(bits_engine(layout_of(field, 0))) is engine
    assert_exact(field, 0, random_rows(9, -(-(field.start + field.num_bits) // 8) + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 5])
def test_too_many_scales_for_a_table(dtype: str, start: int) -> None:
    # 700 bytes, each with scales of its own: whole numbers that every dtype but bool can hold.
    num_bits = 8 * 700
    scale = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 128, num_bits)
    field = Bits("d", (num_bits,), start, scale=tuple(scale), dtype=dtype)
    assert_exact(field, 3, random_rows(3, 3 + 701))


def test_unset_bits_are_plain_zero() -> None:
    field = Bits("d", (4,), scale=(-1.0, math.inf, math.nan, -0.5), dtype=ml_dtypes.bfloat16)
    assert not bytes_of(decode_guarded(field, 0, np.zeros((7, 1), np.uint8))).any()


@pytest.mark.parametrize("field", [CHESS, Bits("d", (10,), 1536), Bits("d", (64, 24), 3, REVERSED)])
def test_scratch_memory_carries_nothing_over(field: Bits) -> None:
    engine = bits_engine(layout_of(field, 0))
    engine.reserve(16)
    for num_records, seed in ((16, 1), (5, 2), (1, 3), (16, 4)):
        rows = random_rows(num_records, 200, seed)
        out = np.empty((num_records, *field.shape), field.dtype)
        engine.decode(rows, out)
        assert np.array_equal(out, reference(field, 0, rows))
