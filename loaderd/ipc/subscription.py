"""The options of a consumer's stream, as it sends them to a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from loaderd.errors import BusyError, OptionError, ServerError
from loaderd.options import Remainder, StreamOptions, Unpack, as_count, require, require_choice

Sharing = Literal["independent", "split", "mirrored"]

_MAX_NAME = 200
_MAX_HOSTS = 1024
# A worker gets two descriptors of each at once, and a message has room for 253.
_MAX_MEMBERS = 120


@dataclass(frozen=True)
class Subscription:
    """Options of the same names as those of ``loaderd.connect``. Raises OptionError where one is out of range.

    ``name``: of the consumer, for logs and reports.
    """

    batch_size: int
    epochs: int | None = 1
    remainder: Remainder = "short"
    shard: tuple[int, int] = (0, 1)
    held_batches: int = 4
    unpack: Unpack = "worker"
    sharing: Sharing = "independent"
    consumers: int = 1
    group: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        options = self.stream_options(workers=1)
        for what in ("batch_size", "epochs", "shard", "held_batches"):
            object.__setattr__(self, what, getattr(options, what))
        require(self.shard[1] <= _MAX_HOSTS, "shard", f"of at most {_MAX_HOSTS} hosts", self.shard)
        require_choice(self.sharing, "sharing", Sharing)
        object.__setattr__(self, "consumers", as_count(self.consumers, "consumers"))
        require(self.consumers <= _MAX_MEMBERS, "consumers", f"at most {_MAX_MEMBERS}", self.consumers)
        for what in ("group", "name"):
            value = getattr(self, what)
            is_name = isinstance(value, str) and len(value) <= _MAX_NAME and value.isprintable()
            require(is_name, what, f"text of at most {_MAX_NAME} printable characters", value)
        if self.shard[1] > 1 and self.sharing != "split":
            raise OptionError(f'shard={self.shard} is for sharing="split", got sharing={self.sharing!r}')
        if self.consumers > 1 and not self.is_group:
            raise OptionError(f'consumers is for sharing="mirrored", got sharing={self.sharing!r}')

    def stream_options(self, **others: Any) -> StreamOptions:
        """The options of the consumer's stream; ``others``: those that are not sent to the server."""
        names = ("batch_size", "epochs", "remainder", "shard", "held_batches", "unpack")
        return StreamOptions(**{name: getattr(self, name) for name in names}, **others)

    @property
    def is_group(self) -> bool:
        return self.sharing == "mirrored"

    @property
    def group_key(self) -> Subscription:
        """What all consumers of a group must agree on: everything but who they are and how much they hold."""
        return replace(self, name="", held_batches=1, shard=(0, self.shard[1]))

    def check_beside(self, others: Iterable[Subscription]) -> None:
        """Raise ServerError unless this consumer fits ``others``, those with the same sharing and group name.

        If it were let in, each would go on without the rest, and some records would come twice, or never.
        """
        if self.sharing == "independent":
            return
        ours, of = asdict(self.group_key), f"the group {self.group!r}" if self.group else "its group"
        for other in others:
            theirs = asdict(other.group_key)
            differing = [name for name, value in ours.items() if theirs[name] != value]
            if differing:
                said = ", ".join(f"{name} {getattr(self, name)!r} instead of {theirs[name]!r}" for name in differing)
                raise ServerError(
                    f"consumers with sharing={self.sharing!r} must agree; this one does not fit {of}: it has {said}",
                    hint="Give all of them the same options, or this one another `group`.",
                )
            if self.sharing == "split" and self.shard == other.shard:
                raise BusyError(
                    f"there is a consumer with shard={self.shard} already: {other.name or 'it has no name'}",
                    hint="Give each consumer a shard of its own; or another `group` to another training.",
                )

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self), "shard": list(self.shard)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Subscription:
        """The way back from :meth:`to_wire`. The values may come from anybody: raises OptionError for wrong ones."""
        known = {each.name for each in fields(cls)}
        if not set(wire) <= known or "batch_size" not in wire:
            raise OptionError(
                f"the options of a stream are {sorted(known)}, batch_size among them; got {list(wire)!r:.200}"
            )
        try:
            return cls(**wire)
        except (TypeError, ValueError) as error:
            raise OptionError(f"an option of the stream has a wrong value: {error}") from None
