"""The orders that are measured are those that are delivered, and the measures measure what they say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import shuffle_quality as quality

from loaderd import Shuffle
from loaderd.options import DEFAULT_BLOCK_RECORDS, DEFAULT_WINDOW_RECORDS

NUM_RECORDS, NUM_SHARDS = 200_003, 7
PARTS = quality.split(NUM_RECORDS, NUM_SHARDS)
BY_CHANCE = quality.orders_of(None, PARTS, 2)
DOC_PATH = Path(__file__).parents[2] / "docs" / "shuffle.md"
DOC = DOC_PATH.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle(2_000, 64), Shuffle(700, 1_000)])
def test_loaderd_delivers_the_order_that_is_computed(shuffle: Shuffle) -> None:
    delivered = quality.delivered_orders(10_007, 3, shuffle, epochs=2, seed=5)
    parts = quality.split(10_007, 3)
    assert np.array_equal(delivered, quality.loaderd_orders(parts, shuffle, epochs=2, seed=5))
    assert not np.array_equal(delivered, quality.loaderd_orders(parts, shuffle, epochs=2, seed=6))
    assert not np.array_equal(delivered[0], delivered[1])


def test_the_measures_of_the_order_of_the_files() -> None:
    order = np.arange(NUM_RECORDS)
    assert 512 / 80 <= quality.games_in_a_batch(order) <= 512 / 80 + 1
    assert quality.span_of_a_game(order) == pytest.approx(79 / NUM_RECORDS)
    assert quality.stray_of_a_batch(order) == pytest.approx(512**0.5, rel=0.01), "all records of a batch stray alike"
    assert quality.meeting_again(order, order) == pytest.approx(NUM_RECORDS / 511, rel=0.01), "all meet again"


def test_the_measures_of_chance() -> None:
    order, later = BY_CHANCE
    num_games = NUM_RECORDS / 80
    assert quality.games_in_a_batch(order) == pytest.approx(num_games * (1 - (1 - 1 / num_games) ** 512), rel=0.01)
    assert quality.span_of_a_game(order) == pytest.approx(79 / 81, rel=0.01)
    assert quality.stray_of_a_batch(order) == pytest.approx(1, abs=0.15)
    assert quality.meeting_again(order, later) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("shuffle", [Shuffle(16_384, 64), Shuffle(16_384, 256), Shuffle(8_192, 512)])
def test_a_batch_strays_as_far_as_the_rule_says(shuffle: Shuffle) -> None:
    """The rule of docs/shuffle.md: √(1 + batch · block / window · (1 - window / records))."""
    orders = quality.loaderd_orders(PARTS, shuffle, epochs=8)
    window = quality.share_of(PARTS, shuffle).largest_window
    rule = np.sqrt(1 + 512 * shuffle.block_records / window * (1 - window / NUM_RECORDS))
    assert np.mean([quality.stray_of_a_batch(order) for order in orders]) == pytest.approx(rule, rel=0.1)


def test_the_page_shows_every_case() -> None:
    rows = re.findall(r"^\| ([^|]+) \| \d+ \| [\d.]+ \| [\d.]+ \|", DOC, flags=re.MULTILINE)
    assert rows == list(quality.CASES)


def test_the_page_is_right() -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", DOC, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, "shuffle.md", "exec"), {})
    windows, memory = (
        [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]
        for line in re.findall(r"^\| (?:`window_records`|memory) \|(.*)", DOC, flags=re.MULTILINE)
    )
    assert memory == [round(2 * quality.SCHEMA.row_bytes * window / 1e6) for window in windows]
    assert f"{DEFAULT_WINDOW_RECORDS:,} (default)" in DOC and f"{DEFAULT_BLOCK_RECORDS:,} consecutive records" in DOC
    assert (DOC_PATH.parent / "images" / "shuffle.svg").exists()
