"""What users give as ``shards``: paths, globs, URIs. They are checked and made absolute here, and not looked up.

But for what is in front of a ``..``: it may be a link.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from typing import Any
from urllib.parse import unquote

from loaderd.errors import NoShardsError, OptionError
from loaderd.shards.shard_file import is_remote


def checked_names(shards: Any) -> str | tuple[str, ...]:
    """What ``shards`` is given as, in a form that can be kept and sent: text, or a tuple of it.

    Raises OptionError for what is no path, glob, URI or iterable of them; NoShardsError for an empty one.
    """
    if isinstance(shards, (str, os.PathLike)):
        return _checked_name(shards)
    if isinstance(shards, (bytes, Mapping)) or not isinstance(shards, Iterable):
        raise _no_shards(shards)
    names = tuple(map(_checked_name, shards))
    if not names:
        raise NoShardsError(
            "shards must name at least one file, got an empty list",
            hint="Was a generator used up before, or is a glob empty? Give the glob itself.",
        )
    return tuple(sorted(names)) if isinstance(shards, Set) else names


def absolute_names(shards: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The same names, relative ones made absolute: whoever uses them may be in another folder by then."""
    if isinstance(shards, tuple):
        return tuple(name if is_remote(name) else absolute(name) for name in shards)
    return shards if is_remote(shards) else absolute(shards)


def _checked_name(name: Any) -> str:
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text or "\0" in text:
        raise _no_shards(name)
    return str(text)  # numpy has a str of its own


def _no_shards(got: Any) -> OptionError:
    return OptionError(f"shards must be a path, a glob, a URI or a list of them, got {got!r:.200}")


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
    """An absolute path without ``.``, and without ``..`` but behind links, which it leads out of by their targets."""
    found = ""
    for part in path.split("/"):
        if part == "..":
            folder, _, last = found.rpartition("/")
            is_above = last != ".." and not os.path.islink(found)
            found = folder if is_above else f"{found}/.."
        elif part not in ("", "."):
            found += f"/{part}"
    return found or "/"
