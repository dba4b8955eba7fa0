"""What users give as ``shards``: paths, globs, URIs. They are checked and made absolute here, but not looked up.

Only what stands in front of a ``..`` is looked at, because it may be a link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, overload
from urllib.parse import unquote

import numpy as np

from loaderd.errors import NoShardsError, OptionError
from loaderd.redaction import redacted, shown
from loaderd.storage.shard_file import is_remote

WILDCARD = re.compile(r"\*\*/?|\*|\?|\[[!^]?\]?[^\]]*\]")


class Columns:
    """The ``shards`` of a data set whose records lie in several files, row by row: ``Columns(name=GLOB, …)``.

    Each name is a field of the schema's ``FixedRecords``. Its files hold this field alone: as plain bytes, one value
    behind the other (Stim's b8), as an npy, or as a column of that name in an npz, Parquet or Arrow file. One name
    may be no field: its files hold all fields that have no files of their own.

    Each value is a path, a glob or a URI. Files belong together if their wildcards match the same text. A file
    without its partners is a NoShardsError; files of unequal lengths are a ShardReadError that names both. Raises
    OptionError for a value that is no path, and for globs with unequal numbers of wildcards.
    """

    def __init__(self, **columns: object) -> None:
        if not columns:
            raise OptionError("Columns must name files: Columns(features='*.a.b8', labels='*.b.b8'), got none")
        self.globs = {name: _checked_name(pattern) for name, pattern in columns.items()}
        numbers = {name: len(WILDCARD.findall(path_pattern(pattern))) for name, pattern in self.globs.items()}
        if len(set(numbers.values())) > 1:
            raise OptionError(f"the globs of Columns must have as many wildcards each, got {shown(self.globs, 300)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.globs.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and list(self.globs.items()) == list(other.globs.items())

    def __hash__(self) -> int:
        return hash(tuple(self.globs.items()))

    def __repr__(self) -> str:
        return f"Columns({', '.join(f'{name}={redacted(pattern)!r}' for name, pattern in self.globs.items())})"


def path_pattern(pattern: str) -> str:
    """A glob as it matches paths: of a URI, without its query and not quoted."""
    return unquote(pattern.partition("?")[0]) if is_remote(pattern) else pattern


def checked_names(shards: Any) -> str | tuple[str, ...] | Columns:
    """``shards`` in a form that can be kept and sent: a string, a tuple of strings, or Columns.

    A name may also be bytes, or a scalar of numpy or a tensor of TensorFlow that holds one. Raises OptionError for
    what is no path, glob, URI or iterable of these; NoShardsError for an empty iterable.
    """
    shards = _without_array(shards)
    if isinstance(shards, Columns):
        return shards
    if isinstance(shards, (str, bytes, os.PathLike)):
        return _checked_name(shards)
    if isinstance(shards, Mapping) or not isinstance(shards, Iterable):
        raise _no_shards(shards)
    names = tuple(map(_checked_name, shards))
    if not names:
        raise NoShardsError(
            "shards must name at least one file, got an empty list",
            hint="Was a generator used up before, or is a glob empty? Give the glob itself.",
        )
    return tuple(sorted(names)) if isinstance(shards, Set) else names


@overload
def absolute_names(shards: Columns) -> Columns: ...
@overload
def absolute_names(shards: str | tuple[str, ...] | Columns) -> str | tuple[str, ...] | Columns: ...
def absolute_names(shards: str | tuple[str, ...] | Columns) -> str | tuple[str, ...] | Columns:
    """The same names, relative ones made absolute: the process that uses them may have another working directory."""
    if isinstance(shards, Columns):
        return Columns(**{name: absolute_names(pattern) for name, pattern in shards.globs.items()})
    if isinstance(shards, tuple):
        return tuple(name if is_remote(name) else absolute(name) for name in shards)
    return shards if is_remote(shards) else absolute(shards)


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are: for a message."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def bracket_hint(pattern: str) -> str:
    """A hint for a glob with a [ that matches nothing: the bracket may belong to a name. "" for any other glob."""
    if "[" not in pattern or "[[]" in pattern:
        return ""
    return f"[ ] are wildcards in a glob. If they belong to the name, write [[] for [: {pattern.replace('[', '[[]')}"


def _checked_name(name: Any) -> str:
    text = _without_array(name)
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not isinstance(text, str) or not text or "\0" in text:
        raise _no_shards(name)
    return str(text)  # it may be numpy's kind of str


def _without_array(value: Any) -> Any:
    """What an eager tensor or a scalar array holds; anything else as it is. A tensor of a graph has no values."""
    to_numpy = getattr(value, "numpy", None)
    if callable(to_numpy) and not isinstance(value, np.ndarray):
        value = to_numpy()
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _no_shards(got: Any) -> OptionError:
    return OptionError(f"shards must be a path, a glob, a URI or a list of them, got {shown(got, 200)}")


def absolute(name: str) -> str:
    """A path, a glob or a ``file://`` URI as an absolute path; NoShardsError where it is relative to nothing."""
    if name.startswith("file://"):
        name = unquote(name.removeprefix("file://").removeprefix("localhost"))
    try:
        path = os.path.expanduser(name)
        return _normal(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    except FileNotFoundError:
        raise NoShardsError(
            f"{name} is relative to the working directory of this process, which has been deleted",
            hint="Change to a folder that exists, or give absolute paths.",
        ) from None


def _normal(path: str) -> str:
    """An absolute path without ``.``. A ``..`` stays only behind a link: it leads to the folder of the target."""
    normal = ""
    for part in path.split("/"):
        if part == "..":
            folder, _, last = normal.rpartition("/")
            is_above = last != ".." and not os.path.islink(normal)
            normal = folder if is_above else f"{normal}/.."
        elif part not in ("", "."):
            normal += f"/{part}"
    return normal or "/"
