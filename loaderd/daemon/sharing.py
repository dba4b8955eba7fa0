"""The ways in which consumers can share a stream, by name."""

from __future__ import annotations

from collections.abc import Callable

from loaderd.daemon.feed import Feed
from loaderd.daemon.members import Members, Own
from loaderd.daemon.mirrored import Mirrored
from loaderd.daemon.shared import Shared
from loaderd.subscription import Sharing

MEMBERS_OF: dict[Sharing, Callable[[Feed, int], Members]] = {
    "independent": Own,
    "split": Own,
    "mirrored": Mirrored,
    "shared": Shared,
}
"""Each is made of the stream and how many members it may have."""
