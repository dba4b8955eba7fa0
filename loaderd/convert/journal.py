"""The journal of a conversion, a file in its folder: what is converted, then a line for each shard that is whole.

A shard is written under another name, read back, renamed, and then noted. A shard that has a line was whole, whenever
the conversion was killed; one that has none is written again. A line is a claim: a conversion that goes on reads the
shard again.
A conversion that goes on without the faulty records at which the one before stopped has a line of its own, too.

The folder may be one to which others can write. So the journal must be a regular file of this user's, and no link.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from loaderd.errors import OptionError
from loaderd.options import is_count
from loaderd.redaction import shown

NAME = ".loaderd-convert.jsonl"
_PREFIX = "shard-"
_BEGINNING = b'{"kind": "job", "digest": "'
_MOST_BYTES = 1 << 28
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as of Lustre, mounted without flock


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is whole. ``num_bytes``: of the file; 0 where it has no record, and so no file.

    ``digest``: SHA-256 of its records' stored features, the same in each format. ``left_out``: records that are
    damaged, or are not what the schema says.
    """

    shard: str
    records: int
    num_bytes: int
    digest: str
    left_out: int = 0


def shard_name(number: int, num_shards: int, ending: str) -> str:
    """The file name of a shard, such as "shard-00000-of-00012.tfrecord"."""
    return f"{_PREFIX}{number:05}-of-{num_shards:05}{ending}"


def temporary_of(path: Path) -> Path:
    """Where a shard is written before it is whole: no glob over the shards finds it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


class Journal:
    """The folder of one conversion, locked: no other conversion writes there before this object is closed.

    On a file system without locks, the user must see to that.

    ``job``: what is converted, and how, as values that JSON can hold. Raises OptionError where the folder holds
    another conversion, one that is running, or files that would be taken for shards of this one.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], ending: str) -> None:
        self._folder = folder
        self.claims: dict[str, FinishedShard] = {}
        """By name: the shards that were whole when they were noted."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder / NAME):
            self._check_empty(ending, "")  # a folder that is refused stays as it is
        self._file = _open(folder / NAME)
        try:
            self._begin({"kind": "job", "digest": _digest_of(job), **job}, job, ending)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, begin: dict[str, Any], job: Mapping[str, Any], ending: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"--to {self._folder} is being written by another conversion", hint="Wait for it, or end it."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        lines, num_bytes = _lines_of(self._file, self._folder / NAME)
        jobs = [line for line in lines if isinstance(line, dict)]
        if jobs:
            _check_same(self._folder, jobs[-1], job)
        self._check_empty(ending, _PREFIX if jobs else "")
        self.claims = {line.shard: line for line in lines if isinstance(line, FinishedShard)}
        self._file.truncate(num_bytes)  # the last conversion was killed while it wrote what is behind
        if not jobs or jobs[-1]["digest"] != begin["digest"]:
            self._append(begin)
        self._remove_temporary()

    def note(self, written: FinishedShard) -> None:
        """Add the line of a shard that was renamed to its name."""
        # If a power failure takes the line away, only this shard is written again.
        self._append({"kind": "shard", **asdict(written)})

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _remove_temporary(self) -> None:
        """Remove the shards that a conversion had begun when it was ended."""
        for path in self._folder.glob(f".{_PREFIX}*.tmp"):
            path.unlink()

    def _check_empty(self, ending: str, but: str) -> None:
        """Raise OptionError for files that a glob over the shards would find, and that this conversion has not made.

        ``but``: what the names of its own files begin with; "": it has made none.
        """
        names = [path.name for path in sorted(self._folder.glob(f"*{ending}")) if not path.name.startswith(".")]
        others = [name for name in names if not but or not name.startswith(but)]
        if others:
            raise OptionError(
                f"--to {self._folder} holds other files: {others[0]}" + (", …" if len(others) > 1 else ""),
                hint="A glob over the shards would find them, too. Choose another folder, or remove them.",
            )

    def close(self) -> None:
        """Unlock the folder: other conversions may write there. No process may write to it any more."""
        try:
            self._remove_temporary()
        finally:
            self._file.close()


def _open(path: Path) -> BinaryIO:
    """The journal, new or not. Raises OptionError where what is there is none of ours."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _refused(path, "a link" if error.errno == errno.ELOOP else "no regular file") from None
            raise
    try:
        _check_owner(path, os.fstat(fd))
        return os.fdopen(fd, "r+b")
    except BaseException:
        os.close(fd)
        raise


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "no regular file")
    with tempfile.TemporaryFile(dir=path.parent) as own:  # a file server may give all files the same owner
        ours = os.fstat(own.fileno()).st_uid
    if status.st_uid not in (ours, 0):
        raise _refused(path, f"a file of user {status.st_uid}")


def _refused(path: Path, what: str) -> OptionError:
    return OptionError(
        f"{path} must be the journal of a conversion by this user, and is {what}",
        hint="Choose another folder, or remove it: then all shards are written again.",
    )


def _lines_of(file: BinaryIO, path: Path) -> tuple[list[dict[str, Any] | FinishedShard], int]:
    """The jobs and shards in a journal, and how many bytes their lines are. Raises OptionError for other lines."""
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > _MOST_BYTES:  # it may be any file
        raise _refused(path, f"larger than {_MOST_BYTES:,} bytes")
    content = file.read(num_bytes)
    whole, end, cut = content.rpartition(b"\n")
    if not end and not _BEGINNING.startswith(cut[: len(_BEGINNING)]):
        raise _refused(path, "another file")
    lines = []
    for number, text in enumerate(whole.split(b"\n") if end else (), 1):
        line = _parsed(text)
        if line is None or (number == 1 and isinstance(line, FinishedShard)):
            raise _refused(path, f"another file: line {number} is {shown(text, 60)}")
        lines.append(line)
    return lines, len(whole) + len(end)


def _parsed(text: bytes) -> dict[str, Any] | FinishedShard | None:
    """A job, or a shard; None for what is neither."""
    try:
        line = json.loads(text)
        kind = line.pop("kind")
        if kind == "job" and isinstance(line["digest"], str):
            job: dict[str, Any] = line
            return job
        written = FinishedShard(**line) if kind == "shard" else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return written if written is not None and _is_sound(written) else None


def _is_sound(written: FinishedShard) -> bool:
    numbers = (written.records, written.num_bytes, written.left_out)
    texts = (written.shard, written.digest)
    return all(is_count(number, 0) for number in numbers) and all(isinstance(text, str) for text in texts)


def _digest_of(job: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _check_same(folder: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if kept.get("on_corrupt") == "raise":
        now = {**now, "on_corrupt": "raise"}  # nothing was left out of shards that are whole: "skip_record" may go on
    if kept.get("digest") == _digest_of(now):
        return
    differ = sorted(key for key in now if kept.get(key) != now[key])
    what = "; ".join(_changed(key, kept.get(key), now[key]) for key in differ) or "one of another digest"
    raise OptionError(
        f"--to {folder} holds another conversion: {what}",
        hint="Give the same arguments to go on with it; or choose another folder, or remove that one.",
    )


def _changed(key: str, was: Any, is_now: Any) -> str:
    """A change in words; of long values, the text around the place from which on they differ."""
    texts = str(was), str(is_now)
    same = next((place for place, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 0)
    start = max(0, same - 30)
    before, after = (_short(text[start:], "…" if start else "") for text in texts)
    return f"{key} was {before}, and is {after}"


def _short(text: str, front: str) -> str:
    return front + (text if len(text) < 60 else f"{text[:57]}…")
