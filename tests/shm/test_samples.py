"""What a page says to those who only look: facts, counters, and samples that are never read half old, half new."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
import pytest

from loaderd.errors import DaemonError
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.page import (
    FACTS_BYTES,
    LAYOUT,
    MAX_FIELDS,
    NUM_MEMBERS,
    NUM_SAMPLES,
    NUM_SEATS,
    NUM_SLOTS,
    NUM_WAITS,
    SAMPLE_WORDS,
    SAMPLES,
    TAKEN_BATCHES,
    WAITS,
    Counter,
    Page,
    words_of,
)
from loaderd.shm.samples import Gauge, PageView, begin, encode_facts, wait_class, write_sample
from loaderd.snapshots import Facts
from loaderd.stages import Stage

FACTS = Facts(
    fields=("board", "score"),
    derived=("score",),
    workers=2,
    cores=4,
    batch_size=8,
    held_batches=4,
    slots=5,
    steps_per_epoch=100,
    windows=2,
    shards=3,
    compressed=1,
    storage=("ext4", "s3"),
    has_bits=True,
    batch_bytes=640_000,
    packed_bytes=20_000,
)


def page_of(facts: Facts = FACTS) -> tuple[Page, PageView]:
    """A page, and what somebody makes of its memory who knows nothing else."""
    text = encode_facts(facts)
    memory = np.zeros(8 * words_of(5, 2) + len(text), np.uint8)
    page = Page(memory, 5, 2)
    begin(page, memory, text)
    return page, PageView.of(memory)


def test_a_page_says_how_it_is_read():
    page, watched = page_of()
    assert watched.facts == FACTS
    page.words[TAKEN_BATCHES] = 7
    assert watched.now().batches == 7 and watched.samples() == []


def test_a_machine_with_large_pages_of_memory(monkeypatch: pytest.MonkeyPatch):
    """As aarch64 may have: 64 KiB, which is more than a page of ours."""
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    text = encode_facts(FACTS)
    memory = SharedMemory.create("large", 8 * words_of(5, 2) + len(text)).bytes
    begin(Page(memory, 5, 2), memory, text)
    assert PageView.of(memory).facts == FACTS


def test_a_page_of_another_version_is_refused():
    page, _ = page_of()
    page.words[LAYOUT] += 1
    with pytest.raises(DaemonError, match="another version"):
        PageView.of(np.frombuffer(page.words.obj, np.uint8))


@pytest.mark.parametrize("size", [1, 7, 56])
def test_memory_that_is_no_page_is_refused(size: int):
    with pytest.raises(DaemonError, match="a page of"):
        PageView.of(np.zeros(size, np.uint8))


@pytest.mark.parametrize("word", [NUM_SLOTS, NUM_SEATS, NUM_MEMBERS, FACTS_BYTES])
@pytest.mark.parametrize("value", [-1, -64, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_a_page_of_a_size_that_cannot_be_is_refused(word: int, value: int):
    page, _ = page_of()
    page.words[word] = value
    with pytest.raises(DaemonError, match="a page of"):
        PageView.of(np.frombuffer(page.words.obj, np.uint8))


@pytest.mark.parametrize("changed", [{"fields": None}, {"fields": [1]}, {"workers": "x"}, {"slots": 1 << 70}])
def test_facts_of_other_types_are_refused(changed: dict[str, Any]):
    text = json.dumps({**FACTS._asdict(), **changed}).encode()
    memory = SharedMemory.create("odd", 8 * words_of(5, 2) + len(text)).bytes
    begin(Page(memory, 5, 2), memory, text)
    with pytest.raises(DaemonError, match="the facts behind a page"):
        PageView.of(memory)


def test_no_time_is_counted_twice():
    """A load is its stages and the rest; a fill is its fields and the rest."""
    page, watched = page_of()
    for seat in range(2):
        spent = page.spent(seat)
        for stage in Stage:
            spent[stage] = 1_000_000_000
        spent[len(Stage)], spent[len(Stage) + 1] = 2_000_000_000, 3_000_000_000
        page.count(seat, Counter.LOAD_NS, 6_000_000_000)
        page.count(seat, Counter.FILL_NS, 9_000_000_000)
    now = watched.now()
    assert now.field_s == {"board": 4, "score": 6}
    assert now.stage_s == {
        **dict.fromkeys(("read", "inflate", "frames", "check", "parse", "order"), 2),
        "fill": 8,
        "slot": 0,
        "window": 0,
    }


@pytest.mark.parametrize(("more", "last"), [(0, f"f{MAX_FIELDS - 1}"), (3, f"f{MAX_FIELDS - 1} and 3 more")])
def test_fields_beyond_those_that_have_a_word_share_the_last_one(more: int, last: str):
    names = tuple(f"f{number}" for number in range(MAX_FIELDS + more))
    page, watched = page_of(FACTS._replace(fields=names))
    page.spent(0)[len(Stage) + MAX_FIELDS - 1] = 5_000_000_000
    found = watched.now().field_s
    assert len(found) == MAX_FIELDS and found[last] == 5


@pytest.mark.parametrize(
    ("waited_ns", "place"), [(0, 0), (4095, 0), (4096, 1), (8191, 1), (8192, 2), (1 << 62, NUM_WAITS - 1)]
)
def test_waits_are_counted_by_powers_of_two(waited_ns: int, place: int):
    assert wait_class(waited_ns) == place


def test_samples_come_in_order_and_old_ones_go():
    page, watched = page_of()
    for number in range(2 * NUM_SAMPLES + 3):
        page.words[TAKEN_BATCHES] = number
        page.words[WAITS + 2] = 2 * number
        write_sample(page, {Gauge.EPOCH: 3 * number, Gauge.IS_COMPILED: 1})
        samples = watched.samples()
        expected = list(range(max(0, number - NUM_SAMPLES + 2), number + 1))
        assert [one.batches for one in samples] == expected
        assert [one.waits[2] for one in samples] == [2 * n for n in expected]
        assert [one.epoch for one in samples] == [3 * n for n in expected]
    assert samples[-1].kernels == "compiled" and samples[-1].time_s > samples[0].time_s


def test_an_outage_comes_with_its_error():
    page, watched = page_of()
    write_sample(page, {})
    page.say_error("é" * 1000)
    write_sample(page, {Gauge.OUTAGE_NS: 5_000_000_000, Gauge.OUTAGE_FAILURES: 3})
    none, outage = (one.outage for one in watched.samples())
    assert none is None and outage is not None
    assert outage[:2] == (5.0, 3) and outage.error == "é" * (len(outage.error)) and len(outage.error) > 200
    page.say_error("503 \x1b[2J")
    (_, outage) = (one.outage for one in watched.samples())
    assert outage is not None and outage.error == "503 [2J", "no character that a terminal obeys"
    page.words[page._error] = -1  # as a hostile consumer may
    assert len(watched.page.error()) < 1000


def test_a_sample_that_is_overwritten_while_it_is_read_is_left_out():
    page, watched = page_of()
    for number in range(NUM_SAMPLES):
        page.words[TAKEN_BATCHES] = number
        write_sample(page, {})
    read = watched.page.sample

    def read_slowly(number: int) -> memoryview[int]:
        watched.page.sample = read  # type: ignore[method-assign]
        page.words[TAKEN_BATCHES] = 1000
        write_sample(page, {})  # to the place of sample 0
        write_sample(page, {})  # to the place of sample 1, which is being read
        return read(number)

    watched.page.sample = read_slowly  # type: ignore[method-assign]
    assert [one.batches for one in watched.samples()] == list(range(3, NUM_SAMPLES)), (
        "and the one whose place comes next"
    )


def test_a_sample_has_room_for_all_that_is_counted():
    page, _ = page_of()
    before = page.words[SAMPLES]
    write_sample(page, dict.fromkeys(Gauge, 1))
    assert page.words[SAMPLES] == before + 1 and page.sample(before)[SAMPLE_WORDS - 1] == 0
