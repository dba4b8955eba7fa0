"""Going on from a position: real loaders, restored at every step, on any number of hosts."""

from __future__ import annotations

import dataclasses
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderd
from loaderd import Position
from loaderd.errors import OptionError
from loaderd.options import Remainder
from tests.helpers.numbered import Numbered

Check = Callable[[loaderd.Batch], list[int]]

SMALL = loaderd.Shuffle(window_records=60, block_records=8)
BRIEFLY = settings.default.max_examples // 100  # each starts many daemons; tests/plan has all positions without any


def batches_and_states(loader: loaderd.Loader, check: Check) -> tuple[list[list[int]], list[str]]:
    """All batches of a pass, and the states, as JSON, in front of each and behind the last."""
    states, batches = [json.dumps(loader.state_dict())], []
    for batch in loader:
        batches.append(check(batch))
        states.append(json.dumps(loader.state_dict()))
    return batches, states


@settings(max_examples=BRIEFLY)
@given(data=st.data(), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda s: sum(s) > 3))
def test_restored_at_every_step(numbered: Numbered, sizes: list[int], data: st.DataObject):
    """What follows a position is what followed it, whatever the workers; in this loader, and in another."""
    total = sum(sizes)
    hosts = data.draw(st.integers(1, min(3, total)))
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, total // hosts)),
        "shuffle": data.draw(st.just(False) | st.builds(loaderd.Shuffle, st.integers(1, 50), st.integers(1, 12))),
        "seed": data.draw(st.integers(0, 3)),
        "epochs": data.draw(st.integers(1, 2)),
        "remainder": data.draw(st.sampled_from(get_args(Remainder))),
        "shard": (data.draw(st.integers(0, hosts - 1)), hosts),
    }
    shards = numbered.write(sizes)
    with numbered.loader(shards, **options) as loader:
        batches, states = batches_and_states(loader, numbered.check)
        behind = loader.position
        (following, _) = batches_and_states(loader, numbered.check)
        for step, state in enumerate(states):
            loader.load_state_dict(json.loads(state))
            assert json.dumps(loader.state_dict()) == state
            again = iter(loader)
            for number in range(step, len(batches)):
                assert numbered.check(next(again)) == batches[number]
            if step < len(batches):
                assert next(again, None) is None
                assert loader.position == behind
        step = data.draw(st.integers(0, len(states) - 1))
    workers, held = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    start = json.loads(states[step])
    with numbered.loader(shards, workers=workers, held_batches=held, start=start, **options) as loader:
        assert loader.state_dict() == start and len(loader) == len(following)
        assert loader.batches_left == (len(batches) - step or len(following))
        expected = [*batches[step:], *following] if step < len(batches) else following
        found: list[list[int]] = []
        while len(found) < len(expected):
            found += numbered.batches(loader)
        assert found == expected


@settings(max_examples=BRIEFLY)
@given(
    data=st.data(),
    remainder=st.sampled_from(["short", "carry"]),
    shuffle=st.sampled_from([SMALL, False]),
    compress=st.booleans(),
)
def test_an_epoch_goes_on_with_other_hosts(
    numbered: Numbered, data: st.DataObject, remainder: Remainder, shuffle: Any, compress: bool
):
    shards = numbered.write([150, 90, 7])
    if compress:
        for path in shards:
            path.write_bytes(gzip.compress(path.read_bytes()))
    position: Position | None = None
    seen: Counter[int] = Counter()
    for _ in range(data.draw(st.integers(1, 3))):
        hosts, batch_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
        steps = data.draw(st.integers(0, 5))
        positions = set()
        for host in range(hosts):
            with numbered.loader(
                shards,
                batch_size=batch_size,
                shuffle=shuffle,
                remainder=remainder,
                shard=(host, hosts),
                start=position,
            ) as loader:
                for _, batch in zip(range(min(steps, loader.batches_left)), loader, strict=False):
                    seen.update(numbered.check(batch))
                positions.add(loader.position.to_json())
        (text,) = positions
        position = Position.from_json(text)
        if position.epoch == 1:
            break
    if position is not None and position.epoch == 0:
        with numbered.loader(
            shards, batch_size=30, shuffle=shuffle, remainder=remainder, workers=2, start=position
        ) as loader:
            assert ("of the rest of epoch 0>" in repr(loader)) == bool(loader.position.past)
            for batch in loader:
                seen.update(numbered.check(batch))
            assert (loader.position.epoch, loader.position.batch) == (1, 0)
        assert repr(loader).endswith("; closed>")
    assert seen == dict.fromkeys(range(247), 1)


def test_far_in_is_as_near_as_the_start(numbered: Numbered):
    shards = numbered.write([1000])
    with numbered.loader(shards, epochs=None) as loader:
        began_s = time.perf_counter()
        loader.load_state_dict(Position(10**9, 73))
        far = numbered.check(next(iter(loader)))
        assert time.perf_counter() - began_s < 60, "a billion epochs would take days"
        assert loader.position.epoch == 10**9 and loader.position.batch == 74
    with numbered.loader(shards, epochs=1, start=Position(10**9, 73)) as loader:
        assert numbered.check(next(iter(loader))) == far


def test_after_counts_across_passes(numbered: Numbered):
    with numbered.loader([100], batch_size=30, epochs=2) as loader:
        start = loader.next_position()
        reached = [loader.after(start, batches) for batches in (0, 3, 7, 8, 21)]
        assert [(p.epoch, p.batch) for p in reached] == [(0, 0), (0, 3), (1, 3), (2, 0), (5, 1)]
        for _ in range(3):
            assert len(list(loader)) == 8
        assert loader.position == loader.after(start, 24)


# ------------------------------------------------------------------------------------------- bad input


def refused(match: str, shards: Any, schema: loaderd.Schema, **options: Any) -> None:
    with pytest.raises(OptionError, match=match):
        loaderd.Loader(shards, schema, **{"batch_size": 10, "workers": 1, **options})


def test_a_position_of_other_data_is_refused(numbered: Numbered):
    shards = numbered.write([60, 40])
    with numbered.loader(shards) as loader:
        next(iter(loader))
        position = loader.position
        state = loader.state_dict()
    refused("seed: 0 when the position was taken, 3 now", shards, numbered.schema, seed=3, start=state)
    with numbered.loader(shards, seed=3) as loader:
        for given in (position, state):
            with pytest.raises(OptionError, match=r"belongs to other data(?s:.*)seed: 0 when .*, 3 now"):
                loader.load_state_dict(given)
        assert loader.position == Position(of=loader.position.of, hosts=1, batch_size=10), "it is as it was"
    refused(
        "shuffle: in blocks of 1024, in windows .* when .*, none, in windows .* now",
        shards,
        numbered.schema,
        shuffle=False,
        start=position,
    )
    for option, given in (
        (r"window_records=70\)", {"window_records": 70}),
        (r"window_records=70, block_records=9\)", {"window_records": 70, "block_records": 9}),
    ):
        with numbered.loader(shards, shuffle=loaderd.Shuffle(**given)) as loader:
            state = loader.state_dict()
        said = rf"Give what it was taken with \(shuffle=loaderd.Shuffle\({option}\), or go"
        refused(said, shards, numbered.schema, start=state)
    refused("remainder: short when .*, drop now", shards, numbered.schema, remainder="drop", start=position)
    refused("shards: 100 records in 2 .* 60 records in 1", shards[:1], numbered.schema, start=position)
    other = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
    refused("features: .* when", shards, other, start=position)
    refused(
        r"start must be what state_dict\(\) returned, or a loaderd.Position, got 3", shards, numbered.schema, start=3
    )
    refused("there is no batch 99 in epoch 0", shards, numbered.schema, start=Position(0, 99))
    derived = dataclasses.replace(
        numbered.schema,
        fields={"id": loaderd.Derived(lambda x: x, "x", dtype="int64")},
        intermediates={"x": loaderd.Array("id")},
    )
    with loaderd.Loader(shards, derived, batch_size=10, workers=1, start=position) as loader:
        assert (len(loader), loader.batches_left) == (10, 9), "fields may change, stored features not"


def test_a_shard_that_changed_is_refused(numbered: Numbered):
    shards = numbered.write([60, 40])
    with numbered.loader(shards) as loader:
        position = loader.position
    (replaced,) = numbered.write([40], folder="other")  # as many records, of the same length, but others
    shards[1].write_bytes(replaced.read_bytes())
    refused(
        "100 records in 2 shards, digest .* when .* 100 records in 2 shards, digest",
        shards,
        numbered.schema,
        start=position,
    )


@pytest.mark.parametrize(("hosts", "batch_size"), [(100, 512), (3, 34)])
def test_one_short_batch(numbered: Numbered, hosts: int, batch_size: int):
    """Fewer records than a batch; each host has one, and one epoch follows the other. A position of it is good."""
    shards = numbered.write([60, 40])
    options: dict[str, Any] = {"epochs": 2, "workers": 1}
    seen = []
    for host in {0, hosts - 1} if hosts > 3 else range(hosts):
        with numbered.loader(shards, batch_size=batch_size, shard=(host, hosts), **options) as loader:
            assert (len(loader), loader.batches_per_epoch) == (2, 1)
            iterator = iter(loader)
            seen.append(numbered.check(next(iterator)))
            position = loader.position
            assert len(seen[-1]) in (100 // hosts, -(-100 // hosts))
            following = numbered.check(next(iterator))
            assert next(iterator, None) is None
    if hosts <= 3:
        assert sorted(number for numbers in seen for number in numbers) == list(range(100))
    with numbered.loader(shards, batch_size=batch_size, shard=(host, hosts), start=position, **options) as loader:
        assert numbered.batches(loader) == [following]
    # Of as many hosts, or of one, in batches that do fit.
    with numbered.loader(shards, batch_size=40, start=position, **options) as loader:
        assert sorted(numbered.records(loader)) == list(range(100))
    refused(r"shard must be of at most 100 hosts", shards, numbered.schema, batch_size=1, shard=(0, 101))
