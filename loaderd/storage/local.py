"""What a path or a glob names on this machine.

``glob.glob`` leaves out, without a word, what it cannot see: a folder that this user may not read, a link whose
target is gone. Half of the shards may be there, in a data store that is not mounted today. So this module walks the
folders itself, and raises an error that names what it cannot look into.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from loaderd.errors import NoShardsError, ShardReadError
from loaderd.storage.names import absolute, bracket_hint, some_of
from loaderd.storage.retries import may_pass

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_SAY_EVERY = 100
_HINT_NOWHERE = "Mount or restore what they point to, or remove them."
_HINT_REGULAR = "A shard must be a regular file: loaderd reads it at several offsets at once."

Entry = tuple[str, os.stat_result]
"""An absolute path, and what the file system says of the file there, links followed."""


def find_files(name: str, on_found: Callable[[int], None] = lambda number: None) -> list[Entry]:
    """The regular files that ``name`` names: a path, a ``file://`` URI, or a glob (in no particular order).

    ``list_shards`` says what a glob matches. Raises NoShardsError where there is no file, and where a glob matches a
    link that leads nowhere, or a folder in place of a file; ShardReadError where something cannot be looked at; and
    OSError where the failure may pass, as of a file system that is away for a while. ``on_found`` is called now and
    then with the number of files found so far.
    """
    path = absolute(name)
    if glob.has_magic(path) and not os.path.exists(path):  # a file may have wildcards in its name
        return _files_of(path, on_found)
    status = _status(path)
    if status is None:
        why = f"is a link to {os.readlink(path)}, which does not exist" if os.path.islink(path) else "does not exist"
        raise NoShardsError(f"{path} {why}", hint=_in_another_form(path) or _what_there_is(path))
    if stat.S_ISDIR(status.st_mode):
        raise is_a_folder(path, [entry.name for entry in _entries(path)])
    if not stat.S_ISREG(status.st_mode):
        raise NoShardsError(f"{path} is not a regular file", hint=_HINT_REGULAR)
    return [(path, status)]


def is_a_folder(name: str, inside: Sequence[str] = ()) -> NoShardsError:
    """The error for a folder that was given where a shard is wanted. ``inside``: what is in it."""
    endings = Counter(filter(None, (os.path.splitext(each)[1] for each in inside)))
    ending = endings.most_common(1)[0][0] if endings else ".tfrecord"
    hint = f"Name the files in it with a glob: {name.rstrip('/')}/*{ending}"
    return NoShardsError(f"{name} is a folder, a shard is a file", hint=hint)


def _files_of(pattern: str, on_found: Callable[[int], None]) -> list[Entry]:
    regular: list[Entry] = []
    lost, others = [], []
    for path in dict.fromkeys(_matches(pattern)):
        status = _status(path)
        if status is None:
            if os.path.islink(path):  # else it was deleted meanwhile, as old shards of growing data are
                lost.append(f"{path} -> {os.readlink(path)}")
        elif not stat.S_ISREG(status.st_mode):
            others.append(f"{path} ({'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'})")
        else:
            regular.append((path, status))
            if len(regular) % _SAY_EVERY == 0:
                on_found(len(regular))
    if lost:
        raise NoShardsError(f"{pattern} matches links that lead nowhere: {some_of(lost)}", hint=_HINT_NOWHERE)
    if others and pattern[-1] not in "*?]":
        text = f"{pattern} matches folders or special files named like shards: {some_of(others)}"
        raise NoShardsError(text, hint="Move them elsewhere, or give a glob that matches the shards alone.")
    if not regular:
        hints = [bracket_hint(pattern), _in_another_form(pattern) or _what_there_is(pattern)]
        raise NoShardsError(f"{pattern} matches no file", hint="\n".join(filter(None, hints)))
    return regular


def _matches(pattern: str) -> Iterator[str]:
    return _below(*_split(pattern), ())


def _split(pattern: str) -> tuple[str, list[str]]:
    """The folder in front of the first wildcard, and the parts of the pattern from there on."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or "/", parts[first:]


def _below(folder: str, parts: list[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """What matches ``parts`` in ``folder``; ``above``: the folders that ``**`` has passed: links may form circles."""
    part, *rest = parts
    if part == "**":
        status = _status(folder)
        if status is None or (status.st_dev, status.st_ino) in above:
            return
        above = (*above, (status.st_dev, status.st_ino))
        if rest:
            yield from _below(folder, rest, ())
    elif not glob.has_magic(part):
        path = os.path.join(folder, part)
        if rest:
            yield from _below(path, rest, above)
        elif os.path.lexists(path):
            yield path
        return
    for entry in _entries(folder):
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if part == "**" or fnmatchcase(entry.name, part):
            if not rest:
                yield entry.path
            if (rest or part == "**") and _is_folder(entry):
                yield from _below(entry.path, parts if part == "**" else rest, above)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return []
        raise _cannot_be_read(folder, error) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Raises NoShardsError for a link that leads nowhere: its target may be a folder that is not mounted."""
    if not entry.is_symlink():
        return entry.is_dir()
    status = _status(entry.path)
    if status is None and os.path.islink(entry.path):
        text = f"{entry.path} leads nowhere: it is a link to {os.readlink(entry.path)}"
        raise NoShardsError(text, hint="Mount or restore that, or remove the link.")
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(path: str) -> os.stat_result | None:
    """Of what is there, links followed; None: nothing is."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise _cannot_be_read(path, error) from None


def _cannot_be_read(path: str, error: OSError) -> OSError | ShardReadError:
    """The error to raise: ``error`` itself if it may pass, else a ShardReadError."""
    if may_pass(error):
        return error
    return ShardReadError(
        f"{path} cannot be read: {error.strerror}", hint="Shards may be missed where it is left out."
    )


def _in_another_form(path: str) -> str:
    """For a path or a glob that names nothing: what differs from it in the Unicode form alone, as a hint; or "".

    The two look alike (an é is one character, or an e and an accent), so the hint shows them with escapes.
    """
    if path.isascii():
        return ""
    from unicodedata import normalize  # few names need it

    folder, _, name = path.rpartition("/")
    while folder and not os.path.isdir(folder):
        folder, _, name = folder.rpartition("/")
    pattern = normalize("NFC", name)
    for entry in sorted(each.name for each in _entries(folder or "/")):
        if entry != name and not entry.isascii() and fnmatchcase(normalize("NFC", entry), pattern):
            return f"Did you mean {entry!a}? It looks like {name!a}, but is another Unicode form of it."
    return ""


def _what_there_is(path: str) -> str:
    """For a path or a glob that names nothing: which folder is missing, or what is in it instead."""
    folder = _split(path)[0] if glob.has_magic(path) else os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"There is no folder {folder}."
    names = sorted(entry.name for entry in _entries(folder))
    return f"{folder} holds {some_of(names)}." if names else f"{folder} is empty."
