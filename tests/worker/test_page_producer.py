"""What a worker claims and makes, and who is rung for."""

from __future__ import annotations

from contextlib import suppress

import pytest

from loaderd.ipc.worker_messages import Withdrawn
from loaderd.shm.page import POSITION, WAKE_DAEMON_AT, key_of, step_of
from loaderd.worker.page_producer import Claim, PageProducer
from tests.helpers.bells import was_rung
from tests.worker.page_scene import SIZE, Died, NewScene, Scene, batches, claimed, do_at


def test_the_slot_that_was_used_last_is_used_next(new_scene: NewScene):
    scene = new_scene(8)
    for _ in range(2):
        assert scene.make("A")
    slots = [slot for slot, key in enumerate(scene.contents) if key is not None]
    for step in range(2):
        assert scene.take(), step
    scene.give_back()
    assert claimed(scene, "A").slot == slots[1]


def test_what_is_withdrawn_is_not_claimed(new_scene: NewScene):
    scene = new_scene(8)
    filler = scene.fillers["A"]
    scene.page.add_news(0)
    assert filler.has_news
    filler.received(Withdrawn(0, 1, 0))
    assert not filler.has_news
    claims = [claimed(scene, "A")]
    scene.withdraw("A", 2, generation=0)
    scene.withdraw("A", 3)
    for _ in range(2):
        scene.begin_writing(claims[-1]), scene.end_writing(claims[-1])
        filler.made(claims[-1])
        claims.append(claimed(scene, "A"))
    assert [claim.step for claim in claims] == [1, 2, 4]


def test_what_cannot_be_made_keeps_its_slot_until_it_is_withdrawn(new_scene: NewScene):
    scene = new_scene(4)
    filler = scene.fillers["A"]
    claim = claimed(scene, "A")
    assert scene.page.makes(0) == claim.key
    filler.not_made(claim)
    assert scene.page.makes(0) == 0, "it is at nothing"
    assert claimed(scene, "B").step == 1
    again = claimed(scene, "A")
    assert (again.step, again.slot) == (2, 2), "neither the batch nor its slot"
    filler.made(again)
    assert not scene.make("A")
    scene.withdraw("A", 0)
    assert claimed(scene, "A").slot == claim.slot


def test_a_slot_that_the_predecessor_left_is_kept(new_scene: NewScene):
    """It is granted when it is known which records to leave out."""
    scene = new_scene(4)
    claim = claimed(scene, "A")
    scene.fillers["A"] = filler = PageProducer(scene.page, 0, scene.page.news(0), [scene.consumer_bell])
    scene.grant("A", batches(1, 6))
    while (other := filler.claim()) is not None:
        assert other.slot != claim.slot and other.step > 0
        filler.made(other)
    scene.grant("A", batches(0, 1, 1))
    again = claimed(scene, "A")
    assert (again.slot, again.step, again.batch.num_records) == (claim.slot, 0, SIZE - 1)


def test_what_is_withdrawn_at_any_moment_is_not_claimed_any_more(new_scene: NewScene):
    """The worker that had it is lost. What is withdrawn may be granted with other records left out."""
    for number in range(60):
        scene = new_scene(4)
        claim = claimed(scene, "B")

        def withdraw(scene: Scene = scene, claim: Claim = claim) -> None:
            scene.page.add_news(0)
            scene.page.claim(claim.slot, 0)

        seen = do_at(scene, "A", number, withdraw)
        found = scene.fillers["A"].claim()
        assert found is None or found.step > 0
        if number >= len(seen):
            withdraw()
        scene.ignore()
        scene.fillers["A"].received(Withdrawn(0, 1, 0))
        assert [step_of(key) for _, key in scene.page.unfinished(0)] == [] if found is None else [found.step]


@pytest.mark.parametrize("told_first", [False, True])
def test_what_cannot_be_made_any_more_keeps_no_slot(new_scene: NewScene, told_first: bool):
    """The consumer went elsewhere meanwhile. Rows that are being replaced may well be such that decoding fails."""
    scene = new_scene(2)
    claim = claimed(scene, "A")
    scene.begin(0)
    if told_first:
        scene.grant("A")
    scene.fillers["A"].not_made(claim)
    if not told_first:
        scene.grant("A")
    assert claimed(scene, "A").slot == claim.slot
    scene.lose("A")
    scene.grant("B")
    scene.finish()


def die() -> None:
    raise Died


@pytest.mark.parametrize("how", ["granted", "withdrawn", "elsewhere"])
def test_wherever_a_worker_dies_that_gives_slots_back_none_is_lost(new_scene: NewScene, how: str):
    """Those that it kept for batches that could not be made."""
    for number in range(3):
        scene = new_scene(4)
        filler = scene.fillers["A"]
        for _ in range(2):
            filler.not_made(claimed(scene, "A"))
        if how == "elsewhere":
            scene.begin(0)
        do_at(scene, "A", number, die, only_writes=True)
        with suppress(Died):
            if how == "withdrawn":
                scene.withdraw("A", 0)
                scene.withdraw("A", 1)
            else:
                scene.grant("A", batches(0, 2))
        scene.ignore()
        for slot, _ in scene.page.unfinished(0):  # the daemon does not want them any more
            scene.page.claim(slot, 0)
        scene.lose("A")
        scene.grant("B")
        scene.finish()


# --------------------------------------------------------------------------------------------------- sleep


def test_whoever_falls_asleep_is_rung_for(new_scene: NewScene):
    """Whenever the batch comes that the consumer sleeps for."""
    for number in range(60):
        scene = new_scene(2)
        do_at(scene, "consumer", number, lambda scene=scene: scene.make("A"))
        sleeps = scene.taker.fall_asleep()
        if scene.page.is_free(0):
            scene.make("A")
        assert not sleeps or was_rung(scene.consumer_bell)


def test_a_worker_without_slots_is_rung_for(new_scene: NewScene):
    """Whenever the consumer gives one back."""
    for actor in ("A", "consumer"):
        for number in range(60):
            scene = new_scene(2)
            assert scene.make("A") and scene.take()

            def fall_asleep(scene: Scene = scene) -> None:
                filler = scene.fillers["A"]
                filler.page.say_sleeps(0, True)
                scene.found = filler.claim()  # type: ignore[attr-defined]

            def give_back(scene: Scene = scene) -> None:
                scene.give_back()

            do_at(scene, actor, number, give_back if actor == "A" else fall_asleep)
            fall_asleep() if actor == "A" else give_back()
            if not hasattr(scene, "found"):
                fall_asleep()
            scene.give_back()
            assert scene.found is not None or was_rung(scene.seat_bells[0])  # type: ignore[attr-defined]


def test_the_daemon_is_rung_for_once_where_the_page_says(new_scene: NewScene):
    scene = new_scene(4)
    scene.page.words[WAKE_DAEMON_AT] = key_of(1, 2)
    for step in range(4):
        scene.make("A")
        assert scene.consume()
        assert scene.page.words[POSITION] == key_of(1, step + 1)
        assert was_rung(scene.daemon_bell) == (step == 1)
