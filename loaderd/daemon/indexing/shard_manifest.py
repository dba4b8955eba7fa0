"""Manifests: the shards that a server's data sets had when they were listed, for trainings that began with these.

A position says by digests which records it belongs to. The manifest with these digests says in which shards they are.
So a server that is started or reloaded after shards were added lists all of them for new trainings, and goes on with
the shards of then where a training comes back.

Each manifest is a file in the server's state folder: ``<data set>-<digests>.json``, each part a hash. The time of its
last change is when it was used last; of each data set, the last ones that were used are kept.

The folder and its files must be this user's, and nobody else's. A file only chooses among the shards that the data
set's own patterns match: it cannot name others. It holds no secrets of URIs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loaderd.dataset import AnyDataset
from loaderd.errors import OptionError, ServerError
from loaderd.redaction import redacted
from loaderd.storage.names import some_of
from loaderd.storage.own_files import write_whole
from loaderd.storage.shard_file import ShardFile

_logger = logging.getLogger("loaderd")

MOST_MANIFESTS = 64
"""Of each data set."""

_SUFFIX = ".json"
_MAX_BYTES = 1 << 28
_HINT = "Bring them back as they were, or go without the position."

Shards = list[tuple[str, int, int]]
"""Of each shard: its URI without secrets, its size in bytes, when it was written in nanoseconds."""


@dataclass(frozen=True)
class Manifest:
    """``digests``: what positions say of the shards. ``sets``: the shards of each set; None of one that grows."""

    dataset: str
    digests: Mapping[str, str]
    sets: Sequence[Shards | None]

    @classmethod
    def of(cls, dataset: str, digests: Mapping[str, str], sets: Iterable[Sequence[ShardFile] | None]) -> Manifest:
        return cls(dataset, digests, [None if files is None else _described(files) for files in sets])

    @property
    def key(self) -> str:
        """The name of its file, without the suffix."""
        return _key(self.dataset, self.digests)

    @property
    def uris(self) -> list[list[str] | None]:
        """The URIs of the shards of each set, without secrets; None of one that grows."""
        return [None if shards is None else [uri for uri, *_ in shards] for shards in self.sets]

    def fits(self, dataset: AnyDataset) -> bool:
        """Whether it is of as many sets, and the same of them grow."""
        return [shards is None for shards in self.sets] == [leaf.grows for leaf in dataset.leaves()]

    def choose(self, listed: Sequence[list[ShardFile]]) -> list[list[ShardFile]]:
        """The shards of the manifest among those ``listed`` for each set. Raises OptionError if some are gone."""
        chosen = []
        for files, shards in zip(listed, self.sets, strict=True):
            wanted = {uri for uri, *_ in shards or ()}
            found = files if shards is None else [file for file in files if redacted(file.uri) in wanted]
            chosen.append(found)
            if gone := sorted(wanted - {redacted(file.uri) for file in found}):
                raise OptionError(
                    f"the position belongs to {len(wanted)} shards, of which {len(gone)} are gone: {some_of(gone)}",
                    hint=_HINT,
                )
        return chosen

    def check(self, digests: Mapping[str, str], chosen: Sequence[Sequence[ShardFile]]) -> None:
        """Raise OptionError, which names the shards, where those ``chosen`` hold records of other ``digests``."""
        if digests == self.digests:
            return
        before = {shard for shards in self.sets for shard in shards or ()}
        changed = [uri for shards in map(_described, chosen) for uri, *rest in shards if (uri, *rest) not in before]
        which = f"{some_of(changed)} changed" if changed else "the data set takes others of their records now"
        raise OptionError(
            f"the position belongs to shards with {_in_words(self.digests)}, and {which}: found {_in_words(digests)}",
            hint=_HINT,
        )

    def encode(self) -> bytes:
        return json.dumps([self.dataset, dict(self.digests), self.sets]).encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The way back from :meth:`encode`. Raises ValueError for anything else."""
        try:
            dataset, digests, sets = json.loads(content)
            shards = [None if each is None else [(str(uri), size, time) for uri, size, time in each] for each in sets]
            return cls(dataset, dict(digests), shards)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"it is no manifest: {error!r:.200}") from None


class Manifests:
    """The manifests in ``folder``, which is made if need be.

    Raises ServerError if it cannot be used, or belongs to another user, or if others have access.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        try:
            Path(folder).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ServerError(f"cannot use the state folder {folder}: {error.strerror}") from None
        try:
            _require_own(os.fstat(self._fd))
        except ValueError as error:
            self.close()
            raise ServerError(f"cannot use the state folder {folder}: {error}") from None

    def close(self) -> None:
        os.close(self._fd)

    def add(self, manifest: Manifest) -> OSError | None:
        """Keep a manifest, and delete those that were not used for longest; returns the error where that fails."""
        try:
            write_whole(manifest.key + _SUFFIX, manifest.encode(), 0o600, self._fd)
            for name in self._names_of(manifest.dataset)[MOST_MANIFESTS:]:
                os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            return error
        return None

    def find(self, dataset: str, digests: Mapping[str, str]) -> Manifest | None:
        return self.get(_key(dataset, digests))

    def get(self, key: str) -> Manifest | None:
        """The manifest with this key; None: there is none that can be used."""
        try:
            return Manifest.decode(self._read(key + _SUFFIX))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.warning("%s/%s is not used: %s", self._folder, key + _SUFFIX, error)
            return None

    def touch(self, dataset: str, digests: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):
            os.utime(_key(dataset, digests) + _SUFFIX, dir_fd=self._fd, follow_symlinks=False)

    def _read(self, name: str) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=self._fd), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it must be a file")
            _require_own(status)
            if status.st_size > _MAX_BYTES:
                raise ValueError(f"it must have at most {_MAX_BYTES} bytes, found {status.st_size}")
            return file.read(status.st_size)

    def _names_of(self, dataset: str) -> list[str]:
        """The files of a data set, the one that was used last in front."""
        used_ns = {}
        for name in os.listdir(self._fd):
            if name.startswith(_hash(dataset)):
                with contextlib.suppress(OSError):  # another server has deleted it
                    used_ns[name] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns
        return sorted(used_ns, key=used_ns.__getitem__, reverse=True)


def _described(files: Iterable[ShardFile]) -> Shards:
    return [(redacted(file.uri), file.size_bytes, file.mtime_ns) for file in files]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _key(dataset: str, digests: Mapping[str, str]) -> str:
    return f"{_hash(dataset)}-{_hash(sorted(digests.items()))}"


def _require_own(status: os.stat_result) -> None:
    """Raise ValueError for what others own, or may write or read."""
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"it must belong to user {os.getuid()}, and nobody else may have access: "
            f"found {stat.filemode(status.st_mode)} of user {status.st_uid}"
        )


def _in_words(digests: Mapping[str, str]) -> str:
    return "; ".join(digests.values())
