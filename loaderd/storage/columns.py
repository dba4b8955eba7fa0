"""Files that belong together row by row, such as features in one and labels in the other: one shard of several files.

They are matched by what the wildcards of their globs stand for: ``a.detection.b8`` and ``a.obs.b8`` by "a", where the
globs are ``*.detection.b8`` and ``*.obs.b8``.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable

from loaderd.errors import NoShardsError, OptionError
from loaderd.redaction import redacted
from loaderd.storage.names import WILDCARD, Columns, path_pattern
from loaderd.storage.shard_file import ShardFile


def list_columns(columns: Columns, list_files: Callable[[str], list[ShardFile]]) -> list[ShardFile]:
    """The shards that ``columns`` names, each of several files. ``list_files`` lists one glob, and raises.

    The globs are absolute. Raises NoShardsError for a file without a partner, OptionError where it may have several.
    """
    found = {name: _by_key(pattern, list_files(pattern)) for name, pattern in columns.globs.items()}
    every = {key: file for files in found.values() for key, file in files.items()}
    for name, files in found.items():
        for key, file in every.items():
            if key not in files:
                missing = _filled(columns.globs[name], key)
                text = f"{file.uri} has no partner: {missing} does not exist, of the column {name!r}"
                raise NoShardsError(text, hint="Files of Columns belong together: each needs one of every column.")
    return [_joined({name: files[key] for name, files in found.items()}) for key in next(iter(found.values()))]


def _by_key(pattern: str, files: list[ShardFile]) -> dict[tuple[str, ...], ShardFile]:
    by_key: dict[tuple[str, ...], ShardFile] = {}
    for file in files:
        other = by_key.setdefault(_stands_for(pattern, file), file)
        if other is not file:
            raise OptionError(
                f"the wildcards of {redacted(pattern)} stand for the same in {redacted(other.uri)} and "
                f"{redacted(file.uri)}",
                hint="Files of Columns are matched by what wildcards stand for: write a glob that tells these apart.",
            )
    return by_key


def _joined(files: dict[str, ShardFile]) -> ShardFile:
    first = next(iter(files.values()))
    return ShardFile(
        first.uri,
        sum(file.size_bytes for file in files.values()),
        max(file.mtime_ns for file in files.values()) if all(file.has_version for file in files.values()) else 0,
        tuple((name, *file[:3]) for name, file in files.items()),
    )


def _stands_for(pattern: str, file: ShardFile) -> tuple[str, ...]:
    """What the wildcards of ``pattern`` stand for in the path of ``file``, which it matches."""
    text = path_pattern(pattern)
    expression, at = "", 0
    for wildcard in WILDCARD.finditer(text):
        expression += re.escape(text[at : wildcard.start()]) + f"({_expression_of(wildcard[0])})"
        at = wildcard.end()
    match = re.fullmatch(expression + re.escape(text[at:]), file.path, re.DOTALL)
    # Else it is a file with wildcards in its name.
    return match.groups() if match and glob.has_magic(text) else ()


def _expression_of(wildcard: str) -> str:
    if wildcard.startswith("**"):
        return "(?:.*/)?" if wildcard.endswith("/") else ".*"
    if wildcard in "*?":
        return "[^/]*" if wildcard == "*" else "[^/]"
    inner = wildcard[1:-1]
    is_not = inner[:1] in "!^"
    return f"[{'^' * is_not}{re.escape(inner[is_not:]).replace(chr(92) + '-', '-')}]"


def _filled(pattern: str, key: tuple[str, ...]) -> str:
    parts = iter(key)
    return WILDCARD.sub(lambda wildcard: next(parts, wildcard[0]), pattern)
