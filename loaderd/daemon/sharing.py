"""Who of a stream's consumers gets which batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loaderd.daemon.outgoing import BrokenBatch, Delivery, PassEnd
from loaderd.daemon.stream import Stream
from loaderd.plan.passes import Pass


@dataclass(frozen=True)
class Progressed:
    pass_: Pass
    step: int


@dataclass(frozen=True)
class Handed:
    member: int
    generation: int
    item: Delivery | BrokenBatch | PassEnd | Progressed


class Own:
    def __init__(self, stream: Stream, num_members: int) -> None:
        self._stream = stream
        self._member = 0

    def join(self, member: int) -> None:
        self._member = member

    def start(self, member: int, generation: int, pass_: Pass, step: int, taken: Sequence[int]) -> None:
        self._stream.start(generation, pass_, step)

    def want(self, member: int, count: int) -> None:
        raise ValueError("want")

    def release(self, member: int, slots: list[int]) -> None:
        self._stream.release(slots)

    def leave(self, member: int) -> None:
        self._stream.stop()

    def stop(self, member: int) -> None:
        self._stream.stop()

    def tick(self, seconds: float) -> None: ...

    def take(self) -> list[Handed]:
        found = []
        while self._stream.outbox:
            found.append(Handed(self._member, self._stream.generation, self._stream.outbox.popleft()))
        return found

    def describe(self, member: int) -> str:
        return ""

    def held_by(self, member: int) -> int:
        return len(self._stream._lent)


Members = Own
MEMBERS_OF: dict[str, type[Own]] = {"independent": Own, "split": Own}
