"""Templates put the rows that a plain loop over the records puts, by the loop and by numpy."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.kernels.rows import Memory, Template, row_putter
from tests.helpers.guarded import guarded

pytestmark = pytest.mark.usefixtures("kernels")

# Two of a length, and two whose lengths differ by as many as the loop's table has entries.
_LENGTHS = [8, 9, 40, 200, 40 + 1024]
_ALL = (1 << 64) - 1
_PADDING = 4


@st.composite
def templates(draw: st.DrawFn, row_bytes: int) -> Template:
    """A row has a varint, if any, then copies, a constant, and four bytes of padding."""
    length = draw(st.sampled_from(_LENGTHS))
    room, at, varints, copies = row_bytes - _PADDING, 0, [], []
    if room >= 8 and draw(st.booleans()):
        width = draw(st.integers(1, 8))
        varints.append((0, draw(st.integers(0, length - width)), width))
        room, at = room - 8, 8
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, min(room, length)) | st.just(min(room, length, 64)))
        if size:
            copies.append((at, draw(st.integers(0, length - size)), size))
            room, at = room - size, at + size
    constants = [(at, np.full(room, 7, np.uint8))] if room else []
    checks = draw(st.sampled_from([[], [(0, 0xFF, 1)], [(0, 0xFF, 2)], [(length - 8, _ALL, 0)]]))
    return Template(length, row_bytes, checks, copies, varints, constants)


def matches(template: Template, record: bytes) -> bool:
    words = ((int.from_bytes(record[at : at + 8], "little"), mask, value) for at, mask, value in template.checks)
    return len(record) == template.length and all(word & mask == value for word, mask, value in words)


def row_of(template: Template, record: bytes) -> bytes:
    row = bytearray(template.row_bytes)
    for to, at, size in template.copies:
        row[to : to + size] = record[at : at + size]
    for to, at, width in template.varints:
        value = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(record[at : at + width]))
        row[to : to + 8] = value.to_bytes(8, "little")
    for to, data in template.constants:
        row[to : to + len(data)] = data.tobytes()
    return bytes(row)


def memory_of(records: list[bytes], places: npt.NDArray[np.int64], row_bytes: int) -> Memory:
    ends = np.array([0, *accumulate(map(len, records))], np.int64)
    out = guarded(bytes(len(records) * row_bytes)).reshape(-1, row_bytes)
    return Memory(guarded(b"".join(records)), ends[:-1].copy(), np.diff(ends), out, places)


@given(data=st.data(), row_bytes=st.sampled_from([8, 24, 200]), seed=st.integers(0, 2**32 - 1))
def test_rows_are_those_of_a_plain_loop(data: st.DataObject, row_bytes: int, seed: int) -> None:
    known = data.draw(st.lists(templates(row_bytes), max_size=4))
    lengths = data.draw(st.lists(st.sampled_from([*(each.length for each in known), 8, 30]), max_size=20))
    random = np.random.default_rng(seed)
    # No byte goes on, so that each can be the last of a varint: checks see to that where templates are learnt.
    records = [bytes([random.integers(0, 3), *random.integers(0, 128, length - 1).tolist()]) for length in lengths]
    records = [bytes(len(record)) if random.random() < 0.3 else record for record in records]
    places = np.where(random.random(len(records)) < 0.8, random.permutation(len(records)), -1)
    memory = memory_of(records, places, row_bytes)
    putter = row_putter(known)
    left = putter.put(memory)

    expected = np.zeros_like(memory.out)
    expected_left, uses = [], dict.fromkeys(known, 0)
    for number, (record, place) in enumerate(zip(records, places.tolist(), strict=True)):
        template = next((each for each in known if matches(each, record)), None)
        if place >= 0 and template is None:
            expected_left.append(number)
        elif place >= 0 and template is not None:
            expected[place] = np.frombuffer(row_of(template, record), np.uint8)
            uses[template] += 1
    assert left.tolist() == expected_left
    assert np.array_equal(memory.out, expected)
    assert putter.take_uses() == uses and not any(putter.take_uses().values())


@pytest.mark.parametrize(("change", "what"), [("start", "record"), ("length", "record"), ("place", "row")])
@pytest.mark.parametrize("value", [-1, 1 << 40, (1 << 63) - 1, -(1 << 63), 4])
def test_what_lies_outside_is_refused(change: str, what: str, value: int) -> None:
    memory = memory_of([bytes(8)] * 3, np.arange(3), 8)
    {"start": memory.starts, "length": memory.lengths, "place": memory.places}[change][2] = value
    putter = row_putter([Template(8, 8, [], [(0, 0, 8)], [], [])])
    if (change == "place" and value < 0) or (change == "start" and value == 4):
        assert not len(putter.put(memory))
    elif change == "length" and value == 4:
        assert putter.put(memory).tolist() == [2]
    else:
        with pytest.raises(IndexError, match=f"a {what} lies outside"):
            putter.put(memory)
