"""Random numbers in derived fields, by real workers: a record draws the same wherever and whenever it is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.plan.passes import Pass
from tests.helpers.numbered import Numbered

Draws = dict[int, tuple[Any, ...]]

SIZES = [300, 1, 199]
OPTIONS: dict[str, Any] = {
    "batch_size": 48,
    "shuffle": loaderd.Shuffle(window_records=120, block_records=32),
    "seed": 7,
    "workers": 1,
}


@pytest.fixture
def schema() -> loaderd.Schema:
    """``id``; ``a`` of its own stream, three numbers; ``b`` and ``c`` of one stream."""

    def draw(bits: Any, random: loaderd.RecordRandom) -> Any:
        return bits + random.integers(0, 1 << 32)

    return loaderd.Schema(
        features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
        fields={
            "id": loaderd.Array("id"),
            "a": loaderd.Derived(lambda random: random.random(3), (), (3,), "float64", random=True),
            "b": loaderd.Derived(draw, "zero", dtype="int64", random="turn"),
            "c": loaderd.Derived(draw, "zero", dtype="int64", random="turn"),
        },
        intermediates={"zero": loaderd.Array("id", scale=0)},
    )


def draws_of(batch: loaderd.Batch) -> Draws:
    """By record's number."""
    assert np.array_equal(batch["b"], batch["c"])
    values = zip(batch["a"].tolist(), batch["b"].tolist(), strict=True)
    return {number: (*a, b) for number, (a, b) in zip(batch["id"].tolist(), values, strict=True)}


def epochs_of(shards: Any, schema: loaderd.Schema, count: int, **options: Any) -> list[Draws]:
    """Of each of the first passes, of an epoch each."""
    with loaderd.Loader(shards, schema, **{**OPTIONS, **options}) as loader:
        found: list[Draws] = [{} for _ in range(count)]
        for draws in found:
            for batch in loader:
                draws.update(draws_of(batch))
    return found


def test_draws_are_those_of_the_record_and_the_epoch(numbered: Numbered, schema: loaderd.Schema):
    shards = numbered.write(SIZES)
    epochs = epochs_of(shards, schema, 2)
    assert all(sorted(draws) == list(range(500)) for draws in epochs)
    for other in (
        {"workers": 2, "held_batches": 1},
        {"workers": 4, "batch_size": 7, "shuffle": False},
        {"shuffle": loaderd.Shuffle(window_records=500, block_records=50)},
    ):
        assert epochs_of(shards, schema, 2, **other) == epochs, other
    hosts = [epochs_of(shards, schema, 2, shard=(host, 2)) for host in range(2)]
    for epoch, draws in enumerate(epochs):
        assert draws == {number: drawn for host in hosts for number, drawn in host[epoch].items()}
    every = [*epochs[0].values(), *epochs[1].values(), *epochs_of(shards, schema, 1, seed=8)[0].values()]
    assert len({value for drawn in every for value in drawn}) == 4 * len(every) == 4 * 1500


def test_draws_are_the_same_after_a_resume(numbered: Numbered, schema: loaderd.Schema):
    shards = numbered.write(SIZES)
    epochs = epochs_of(shards, schema, 2)
    with loaderd.Loader(shards, schema, **OPTIONS) as loader:
        for step in (9, 0, 4):
            batch = loader._fetch(Pass(1, 1), step)
            assert batch is not None
            draws = draws_of(batch)
            assert draws == {number: epochs[1][number] for number in draws}


@pytest.mark.slow
def test_other_shards_leave_the_draws_alone(numbered: Numbered, schema: loaderd.Schema):
    shards = numbered.write(SIZES)
    (draws,) = epochs_of(shards, schema, 1)
    (fewer,) = epochs_of([shards[2], shards[0]], schema, 1)
    assert fewer == {number: drawn for number, drawn in draws.items() if number != 300}
    folder = shards[0].parent.rename(shards[0].parent.parent / "another folder")
    assert epochs_of(folder / "*.tfrecord", schema, 1) == [draws]
    (folder / "000.tfrecord").rename(folder / "003.tfrecord")
    (renamed,) = epochs_of(folder / "*.tfrecord", schema, 1)
    assert {number for number in renamed if renamed[number] != draws[number]} == set(range(300))
