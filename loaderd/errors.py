"""Every exception that loaderd raises, and the damage record that several of them carry.

::

    LoaderdError
    ├── OptionError (ValueError)      an argument is outside what it may be
    ├── SchemaError (ValueError)      a schema contradicts itself
    ├── ShardError                    something is wrong with the data
    │   ├── NoShardsError             a path, glob or URI names no file
    │   ├── ShardReadError            a shard is gone, or is another one
    │   │   └── ShardFormatError      a file of another kind
    │   ├── StorageError              storage does not answer: ask again
    │   ├── CorruptRecordError        a CRC does not match, a file is cut
    │   ├── RecordMismatchError       a record is not what the schema says
    │   └── EmptyBatchError           all records of a batch are left out
    ├── WorkerError                   a function raised, a worker died
    ├── DaemonError                   the daemon could not start, or ended
    ├── ServerError                   a server refuses, or is away
    │   └── BusyError                 it has as many consumers as it may
    └── ClosedError                   used after close(), or in a fork

    SkippedDataWarning (UserWarning)  records or shards are left out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from loaderd.redaction import printable, readable, readable_line, redacted

_P = ParamSpec("_P")
_R = TypeVar("_R")

HOW_TO_GO_ON = (
    "Ask the same iterator again (next) to go on with the same batch, or call "
    "loader.load_state_dict(loader.state_dict()) before a new loop, which begins the next pass otherwise."
)
"""The hint of an error after which no batch is lost."""
HOW_TO_GO_ON_BEHIND = "Ask the same iterator again (next) to go on with the batch behind it."
"""The hint of an error in place of a batch."""


def install_hint(extra: str) -> str:
    """The command that installs what an extra of loaderd needs, such as ``pip install 'rich>=13'``.

    It names the packages, and not loaderd, which is on no package index. Where loaderd was never installed, and so
    does not know its extras, it names the extra of the current folder.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("loaderd") or []
    except PackageNotFoundError:
        requirements = []
    of_extra = re.compile(rf"""extra == ["']{re.escape(extra)}["']""")
    named = [one.partition(";")[0].strip() for one in requirements if of_extra.search(one)]
    return "pip install " + " ".join(f"'{one}'" for one in named or [f".[{extra}]"])


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged record of a shard, or a lost stretch that counts as one: where it is, and what was wrong.

    ``record`` counts the records of the shard from 0; ``offset`` is where the record's framing starts, in
    bytes (of the decompressed stream, for a compressed shard). ``lost_bytes`` is how much of the shard the
    damage takes away; -1 where nothing after it can be read. An ``offset`` of -1: unknown. A shard that cannot be
    read when it is indexed counts as one damage, of record 0; of one that becomes unreadable later, each record. A
    member of a tar counts as one damage, too. ``other_records``: where all that is wrong with a member is that its
    records are of another version than the schema's, how many there are; else 0.
    """

    shard: str
    record: int
    offset: int
    expected: str
    found: str
    lost_bytes: int = 0
    other_records: int = 0

    def __post_init__(self) -> None:
        for name in ("shard", "expected", "found"):
            object.__setattr__(self, name, redacted(getattr(self, name)))

    def __str__(self) -> str:
        place = f"{self.shard}: record {self.record}" + (f" at byte {self.offset}" if self.offset >= 0 else "")
        return readable_line(f"{place}: expected {self.expected}, found {self.found}")

    def to_wire(self) -> dict[str, Any]:
        """The damage as plain values, for a message or a file; ``Damage(**wire)`` is the way back."""
        return asdict(self)


class LoaderdError(Exception):
    """The root of every exception of this package. Its texts hold no secret, and can be printed (see ``redaction``).

    ``hint`` says what to do. ``damages``: the damaged records that it is about, if any.
    """

    instead_of_batch = False
    """Of an error from ``Loader._fetch``: True: that batch never comes; False: it may be asked for again."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        damage: Damage | None = None,
        damages: tuple[Damage, ...] = (),
        traceback: str = "",
    ) -> None:
        message = readable(message)
        super().__init__(message)
        self.message = message
        self.hint = readable(hint)
        self.damages = damages or (() if damage is None else (damage,))
        self.traceback = printable(redacted(traceback))

    @property
    def damage(self) -> Damage | None:
        """The first of ``damages``."""
        return self.damages[0] if self.damages else None

    def __str__(self) -> str:
        parts = [self.message]
        if self.hint:
            parts.append(self.hint)
        if self.traceback:
            parts.append("Where it was raised, in another process:\n" + self.traceback.rstrip())
        return "\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (to_wire(self),)


class OptionError(LoaderdError, ValueError):
    """An argument is outside what it may be."""


class SchemaError(LoaderdError, ValueError):
    """A schema contradicts itself."""


class ShardError(LoaderdError):
    """Something is wrong with the data."""


class NoShardsError(ShardError, FileNotFoundError):
    """A path, glob or URI names no file."""


class ShardReadError(ShardError, OSError):
    """A shard is not there (any more), may not be read, or is not the one that was indexed."""


class ShardFormatError(ShardReadError):
    """A shard is plainly a file of another kind than the schema says. It ends the loader, whatever on_corrupt is."""


class StorageError(ShardError, OSError):
    """Storage does not answer, fails or refuses. No record is damaged, and none is lost if it is asked for again."""


class CorruptRecordError(ShardError):
    """A CRC does not match, or a file ends in the middle of a record."""


class EmptyBatchError(ShardError):
    """All records of a batch are left out, as ``on_corrupt`` says. Iterators go on with the next batch."""


class RecordMismatchError(ShardError):
    """A record is whole, but is not what the schema says: a feature is missing, mistyped or of another length."""


class WorkerError(LoaderdError):
    """A user's function raised in a worker, or a worker died again and again at the same task."""


class DaemonError(LoaderdError):
    """The daemon could not start, or ended while it was needed."""


class ServerError(LoaderdError):
    """A server refuses (its token, version, limits), does not know the data set, or cannot be reached."""


class BusyError(ServerError):
    """A server, or a group of its consumers, has as many consumers as it may have; it has room when one leaves."""


class ClosedError(LoaderdError):
    """The loader, or the iterator, was used after it ended."""


class SkippedDataWarning(UserWarning):
    """Records or shards are left out, as ``on_corrupt`` says: how many so far, and why the first of them."""


_CLASSES: dict[str, type[LoaderdError]] = {
    name: found
    for name, found in list(globals().items())
    if isinstance(found, type) and issubclass(found, LoaderdError)
}


def to_wire(error: LoaderdError) -> dict[str, Any]:
    """The error as plain values, for a message between processes: of its class here, or what that is derived from."""
    return {
        "class": next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASSES),
        "message": error.message,
        "hint": error.hint,
        "damages": [damage.to_wire() for damage in error.damages],
        "traceback": error.traceback,
    }


def from_wire(wire: dict[str, Any]) -> LoaderdError:
    """The error that ``to_wire`` described."""
    return _CLASSES.get(wire["class"], LoaderdError)(
        wire["message"],
        hint=wire["hint"],
        damages=tuple(Damage(**damage) for damage in wire["damages"]),
        traceback=wire["traceback"],
    )


def at_damage(cls: type[ShardError], damage: Damage, *, hint: str) -> ShardError:
    """An error of class ``cls`` that names the place of ``damage``."""
    return cls(str(damage), hint=hint, damage=damage)


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments of ``function``."""
    code = function.__code__
    return [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name != "self"]


def names_its_arguments(
    function: Callable[_P, _R], names: Mapping[str, str] = MappingProxyType({})
) -> Callable[_P, _R]:
    """``function``, whose TypeError for an argument that it does not have names the one that was meant.

    ``names``: what to do in place of giving some that it does not have.
    """
    arguments = arguments_of(function)

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in arguments:
                from difflib import get_close_matches

                own = function.__qualname__.removesuffix(".__init__")
                near = [f"; did you mean {each}=?" for each in get_close_matches(name, arguments, 1)]
                there = f": {names[name]}" if name in names else "".join(near) or f"; it has {', '.join(arguments)}"
                raise TypeError(f"{own} has no option {name!r}{there}")
        return function(*args, **kwargs)

    return checked
