"""A short run of the mutation test; ``python -m tests.reliability.mutations`` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest

from loaderd.formats import blocks, framing
from tests.reliability import mutations
from tests.reliability.mutate import BYTES, STREAM, healthy_shards, mutated_examples


@pytest.mark.slow
def test_what_is_promised_of_damaged_shards_holds():
    found = mutations.run(seed=1, first=0, count=300)
    kinds = {kind.removesuffix(" (compressed)") for kind in found["kinds"]}
    assert {*BYTES, *STREAM} <= kinds and any("compressed bytes" in kind for kind in kinds)
    assert found["counts"]["forged: records"] and sum("an index" in kind for kind in kinds) > 3
    assert 0 < found["counts"]["records delivered"] < found["counts"]["records of healthy shards"]


def test_a_case_follows_from_its_number():
    shards = healthy_shards()
    assert mutations.make_case(0, 7, shards) == mutations.make_case(0, 7, shards)
    assert mutations.make_case(0, 7, shards) != mutations.make_case(1, 7, shards)
    assert mutated_examples(shards[2], Random(1)) != shards[2].stream


def test_a_reader_that_checks_no_data_is_caught():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "check_data_crcs", lambda *_: [])
        with pytest.raises(mutations.Violation, match=r"case \d+ of seed 0 \(.*\): "):
            mutations.run(seed=0, first=0, count=200)


def test_a_reader_that_counts_wrong_behind_damage_is_caught():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_parts", lambda block: [block])
        with pytest.raises(mutations.Violation, match=r"is intact, and lost|names another|should be"):
            mutations.run(seed=0, first=765, count=20)


@pytest.mark.slow  # it says how TensorFlow does, and imports it; what is promised of our reader is above
def test_tensorflows_reader_of_the_same_files():
    """In a process of its own, for it forks, and here TensorFlow may have threads already."""
    command = [sys.executable, "-m", mutations.__name__, "--count", "24", "--tensorflow", "5"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    counts = json.loads(done.stdout)["counts"]
    assert counts["TensorFlow: shards"] == 5
    assert counts["TensorFlow: records that are nowhere"] == 0
    assert counts["TensorFlow: records"] <= counts["loaderd: records of the same"]
    ends = sum(counts.get(f"TensorFlow: {end}", 0) for end in ("end", "error", "death"))
    assert ends == 5
