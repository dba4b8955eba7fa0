"""What a worker makes wherever it dies, and whatever another one or the consumer does while it is at the page."""

from __future__ import annotations

from contextlib import suppress

import pytest

from loaderd.shm.page import key_of
from tests.worker.page_scene import SIZE, Died, Do, NewScene, Scene, batches, claimed, do_at

# -------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("num_slots", [2, 4])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_wherever_a_worker_dies_each_batch_comes_once(new_scene: NewScene, num_slots: int, before: int):
    """In front of each access, and so behind each write."""
    number, died = 0, [True]
    while died:
        died = []
        scene = new_scene(num_slots)
        for _ in range(before):
            scene.make("B")
            scene.consume()
        do_at(scene, "A", number, lambda died=died: die(died))
        with suppress(Died):
            scene.make("A")
        number += 1
        scene.ignore()
        scene.lose("A")
        scene.finish()
    assert number > 10


def die(died: list[bool]) -> None:
    died.append(True)
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
        do_at(scene, "A", number, lambda: die([]), only_writes=True)
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


# ------------------------------------------------------------------------------------------- interleavings


def two(first: Do, second: Do) -> Do:
    return lambda scene: (first(scene), second(scene))


def make_b(scene: Scene) -> bool:
    return scene.make("B")


def claim_b(scene: Scene) -> None:
    """B claims, and goes on when A has ended."""
    claim = scene.fillers["B"].claim()
    if claim is not None:
        scene.begin_writing(claim)
        scene.later.append(lambda: (scene.end_writing(claim), scene.fillers["B"].made(claim)))  # type: ignore[attr-defined]


OTHERS: dict[str, Do] = {
    "B makes": make_b,
    "B claims": claim_b,
    "taken": Scene.take,
    "consumed": Scene.consume,
    "given back": Scene.give_back,
    "B makes, consumed": two(make_b, Scene.consume),
    "B makes, taken": two(make_b, Scene.take),
    "B makes two": two(make_b, make_b),
    "B makes two, both consumed": two(two(make_b, make_b), two(Scene.consume, Scene.consume)),
    "consumed, B makes": two(Scene.consume, make_b),
    "consumed, B claims": two(Scene.consume, claim_b),
}
BEFORE: dict[str, Do] = {
    "nothing": lambda scene: None,
    "A makes": lambda scene: scene.make("A"),
    "B makes": make_b,
    "A makes, taken": two(lambda scene: scene.make("A"), Scene.take),
    "all three": two(two(lambda scene: scene.make("A"), make_b), Scene.take),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("num_slots", [2, 4])
def test_whatever_happens_while_a_worker_is_at_the_page(new_scene: NewScene, num_slots: int, other: str):
    for before in BEFORE.values():
        number, seen = -1, [0]
        while number < len(seen):
            number += 1
            scene = new_scene(num_slots)
            scene.later = []  # type: ignore[attr-defined]
            before(scene)
            seen = do_at(scene, "A", number, lambda scene=scene: OTHERS[other](scene))
            scene.make("A")
            for do in scene.later:  # type: ignore[attr-defined]
                do()
            scene.finish()


def test_two_may_make_the_same_batch_and_one_is_passed_over(new_scene: NewScene):
    """It does happen in the interleavings above; else they would prove less than they seem to."""
    times = 0
    for number in range(40):
        scene = new_scene(4)
        do_at(scene, "A", number, lambda scene=scene: scene.make("B"))
        scene.make("A")
        keys = [key for slot, key in enumerate(scene.page.keys()) if not scene.page.is_free(slot)]
        times += len(keys) == 2 and keys[0] == keys[1]
        scene.finish()
    assert times > 0


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("at", ["A", "consumer"])
def test_the_consumer_goes_elsewhere_while_a_worker_is_at_the_page(new_scene: NewScene, at: str, told: bool):
    for before in BEFORE.values():
        number, seen = -1, [0]
        while number < len(seen):
            number += 1
            scene = new_scene(4)
            before(scene)
            begin = lambda scene=scene: scene.begin(2)  # noqa: E731
            make = lambda scene=scene: scene.make("A")  # noqa: E731
            seen = do_at(scene, at, number, begin if at == "A" else make)
            make() if at == "A" else begin()
            if scene.generation == 1:
                begin()
            scene.give_back()
            if told:
                scene.make("B")  # which does not know
            scene.grant("B")
            scene.grant("A")
            scene.finish(2)


@pytest.mark.parametrize("workers_do", ["make", "make two", "make three"])
@pytest.mark.parametrize("consumer_does", ["take", "consume"])
@pytest.mark.parametrize("num_slots", [2, 4])
def test_whatever_happens_while_the_consumer_is_at_the_page(
    new_scene: NewScene, num_slots: int, consumer_does: str, workers_do: str
):
    makes: list[Do] = [lambda scene: scene.make("A"), make_b, lambda scene: scene.make("A")]
    does: Do = {"take": Scene.take, "consume": Scene.consume}[consumer_does]
    for before in (*BEFORE.values(), two(BEFORE["all three"], Scene.give_back)):
        number, seen = -1, [0]
        while number < len(seen):
            number += 1
            scene = new_scene(num_slots)
            before(scene)
            num_makes = {"make": 1, "make two": 2, "make three": 3}[workers_do]
            seen = do_at(
                scene, "consumer", number, lambda scene=scene, n=num_makes: [make(scene) for make in makes[:n]]
            )
            does(scene)
            scene.finish()


def test_a_worker_that_has_claimed_may_give_way_while_the_consumer_looks(new_scene: NewScene):
    """And make another batch in that slot: the consumer must not take it for the one that was claimed there."""
    for number in range(40):
        scene = new_scene(4)
        slot = 3
        scene.page.claim(slot, key_of(1, 0))  # B has claimed, and not looked again yet

        def give_way(scene: Scene = scene, slot: int = slot) -> None:
            scene.page.claim(slot, key_of(1, 1))
            scene.contents[slot] = key_of(1, 1)
            scene.page.fill(slot, SIZE)

        do_at(scene, "consumer", number, give_way)
        if scene.taker.has_batch():
            raise AssertionError("batch 0 is nowhere")
        if scene.page.is_free(slot):
            give_way()
        scene.finish()
