"""Two workers and a consumer at one page, each of them interrupted anywhere and for any time, and workers that die.

Each of them runs in a thread of its own, one at a time, in random order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.page_scene import Died, Scene


class Schedule:
    """Actors that run one at a time, and may be interrupted in front of each access to the page.

    ``stall_timer``: how many accesses one of them has in a row, on average.
    """

    def __init__(self, scene: Scene, seed: int, patience: int) -> None:
        self._random = random.Random(seed)
        self._patience = patience
        self._idle = threading.Semaphore(0)
        self._turns: dict[str, threading.Semaphore] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._errors: list[BaseException] = []
        self._left = 0
        self.doomed: set[str] = set()
        """Who dies at the next access."""
        self.stopped = ""
        """Who does not go on for now, unless nobody else is there."""
        self.num_accesses = 0
        scene.on_access = self._on_access

    def add(self, name: str, do: Callable[[], None]) -> None:
        """One that does this."""

        def run() -> None:
            self._turns[name].acquire()
            try:
                do()
            except Died:
                pass
            except BaseException as error:
                self._errors.append(error)
            del self._turns[name]
            self._left = 0
            self._idle.release()

        self._turns[name] = threading.Semaphore(0)
        self._threads[name] = threading.Thread(target=run, name=name)
        self._threads[name].start()

    @property
    def names(self) -> set[str]:
        """Those that have not come to their end."""
        return set(self._turns)

    def has(self, name: str) -> bool:
        """Whether it has not come to its end."""
        return name in self._turns

    def _on_access(self, actor: str, writes: bool) -> None:
        if threading.current_thread() is not self._threads.get(actor):
            return  # the test is at it
        self.num_accesses += 1
        self._left -= 1
        if self._left <= 0:
            self._idle.release()
            self._turns[actor].acquire()
        if actor in self.doomed:
            self.doomed.remove(actor)
            raise Died

    def step(self) -> None:
        """Let one of them go on for a while."""
        actor = self._random.choice(sorted(self.names - {self.stopped} or self.names))
        self._left = self._random.randint(1, 2 * self._patience)
        self._turns[actor].release()
        self._idle.acquire()
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """End them all."""
        for actor in list(self._turns):
            self.doomed.add(actor)
            while actor in self._turns:
                self._turns[actor].release()
                self._idle.acquire()
        for thread in self._threads.values():
            thread.join()


def play(seed: int, num_slots: int, patience: int, most_held: int, num_deaths: int, goes_elsewhere: bool) -> Scene:
    """One run to its end; raises AssertionError where something is not as it must be."""
    rng = random.Random(seed + 1)
    scene = Scene(num_slots, 8)
    schedule = Schedule(scene, seed, patience)
    elsewhere = rng.randrange(8) if goes_elsewhere else None

    def ended() -> bool:
        return scene.taker.step == scene.num_steps and elsewhere is None

    def consume() -> None:
        nonlocal elsewhere
        while not ended():
            if elsewhere is not None and scene.taker.step >= elsewhere:
                elsewhere = None
                scene.begin(1)
                scene.unread = {"A", "B"}  # type: ignore[attr-defined]
            scene.take()
            if len(scene.lent) >= most_held or rng.random() < 0.3:
                scene.give_back()

    def work(name: str) -> None:
        while not ended():
            if name in scene.unread and rng.random() < 0.2:  # type: ignore[attr-defined]
                scene.unread.remove(name)  # type: ignore[attr-defined]
                scene.grant(name)
            scene.make(name)

    scene.unread = set()  # type: ignore[attr-defined]
    try:
        schedule.add("consumer", consume)
        for name in "AB":
            schedule.add(name, lambda name=name: work(name))  # type: ignore[misc]
        for number in range(100_000):
            if not schedule.has("consumer"):
                break
            assert number < 50_000, "it comes to no end"
            if num_deaths and rng.random() < 0.02:
                num_deaths -= 1
                schedule.doomed.add(rng.choice("AB"))
            schedule.step()
            for name in "AB":
                if not schedule.has(name) and not ended():
                    scene.unread.discard(name)  # type: ignore[attr-defined]
                    scene.lose(name)
                    schedule.add(name, lambda name=name: work(name))  # type: ignore[misc]
        schedule.doomed.clear()
        while schedule.has("A") or schedule.has("B"):
            schedule.step()
        for name in sorted(scene.unread):  # type: ignore[attr-defined]
            scene.grant(name)
        scene.give_back()
        scene.finish(1 if goes_elsewhere else 0)
    finally:
        schedule.close()
        scene.close()
    return scene


@given(
    seed=st.integers(0, 1 << 32),
    num_slots=st.integers(2, 5),
    patience=st.sampled_from([1, 3, 10, 40]),
    most_held=st.integers(1, 4),
    num_deaths=st.integers(0, 3),
    goes_elsewhere=st.booleans(),
)
def test_each_batch_comes_once_and_in_order_whoever_is_interrupted_where(
    seed: int, num_slots: int, patience: int, most_held: int, num_deaths: int, goes_elsewhere: bool
):
    play(seed, num_slots, patience, min(most_held, num_slots - 1), num_deaths, goes_elsewhere)
