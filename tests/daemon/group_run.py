"""A group of consumers, and a stream behind it, followed step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from loaderd.daemon.delivery.events import Delivery, PassEnd
from loaderd.daemon.groups.members import Handed, Members
from loaderd.daemon.groups.mirrored_group import Mirrored
from loaderd.plan.passes import Pass
from tests.daemon.sharing_run import Workshop

END = "end"
STEPS = 6


class Run:
    """Members 1 to ``num_members``, who have joined, and all that they get: steps, and END."""

    def __init__(self, num_members: int, *, num_slots: int = 4, broken: Collection[int] = ()) -> None:
        """``num_slots``: the most that a member can have."""
        self.work = Workshop(STEPS, num_slots * num_members, broken)
        self.members: Members = Mirrored(self.work.feed, num_members)
        self.got: dict[int, list[Any]] = defaultdict(list)
        self.kept: dict[int, list[int]] = defaultdict(list)
        self.generations: dict[int, int] = defaultdict(int)
        for member in range(1, num_members + 1):
            self.members.join(member)

    def start(self, member: int, step: int = 0, *, epoch: int = 0) -> None:
        self.generations[member] += 1
        self.members.start(member, self.generations[member], Pass(epoch, 1), step)

    def start_all(self, *members: int) -> None:
        for member in members:
            self.start(member)

    def leave(self, member: int) -> None:
        self.members.leave(member)
        self.members.give_back_all(member)
        self.kept.pop(member, None)

    def release(self, member: int) -> None:
        self.members.release(member, self.kept.pop(member, []))

    def go(self, *releasing: int) -> None:
        """Until nothing more comes; members in ``releasing`` give back what they get."""
        while True:
            self.work.work()
            handed = self.listen()
            for member in releasing:
                self.release(member)
            if not handed:
                return

    def listen(self) -> list[Handed]:
        """Take what there is."""
        handed = self.work.hand_over(self.members)
        for one in handed:
            self.hear(one)
        return handed

    def hear(self, handed: Handed) -> None:
        member, item = handed.member, handed.item
        assert handed.generation == self.generations[member]
        if isinstance(item, PassEnd):
            self.got[member].append(END)
        else:
            self.got[member].append(item.step)
            if isinstance(item, Delivery):
                self.kept[member].append(item.slot)
