"""The journal of a conversion, a file in its folder: what is converted, then a line for each shard that is whole.

A shard is written under another name, read back, renamed, and then noted. So a shard that has a line is whole,
whenever the conversion was killed; one that has none is written again. Any process appends a line by one write.
A conversion that goes on without the faulty records at which the one before stopped has a line of its own, too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loaderd.errors import OptionError

NAME = ".loaderd-convert.jsonl"
_PREFIX = "shard-"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as of Lustre, mounted without flock


@dataclass(frozen=True)
class Written:
    """A shard that is whole. ``num_bytes``: of the file; 0 where it has no record, and so no file.

    ``digest``: SHA-256 of its records' stored features, the same in each format. ``left_out``: records that are
    damaged, or are not what the schema says. ``without``: positions and games of a PGN that have no score.
    """

    shard: str
    records: int
    num_bytes: int
    digest: str
    left_out: int = 0
    without: int = 0


def shard_name(number: int, num_shards: int, ending: str) -> str:
    """The file name of a shard, such as "shard-00000-of-00012.tfrecord"."""
    return f"{_PREFIX}{number:05}-of-{num_shards:05}{ending}"


def temporary_of(path: Path) -> Path:
    """Where a shard is written before it is whole: no glob over the shards finds it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def note(folder: Path, written: Written) -> None:
    """Append the line of a shard that was renamed to its name."""
    line = json.dumps({"kind": "shard", **asdict(written)}) + "\n"
    journal = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(journal, line.encode())  # if a power failure takes the line away, only this shard is written again
    finally:
        os.close(journal)


class Journal:
    """The folder of one conversion, locked: no other conversion writes there before this object is closed.

    On a file system without locks, the user must see to that.

    ``job``: what is converted, and how, as values that JSON can hold. Raises OptionError where the folder holds
    another conversion, one that is running, or files that would be taken for shards of this one.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], ending: str) -> None:
        self._folder = folder
        self.done: dict[str, Written] = {}
        """By name: the shards that were whole when this object was made."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / NAME).exists():
            self._check_empty(ending, "")  # a folder that is refused stays as it is
        self._file = open(folder / NAME, "a+b")  # noqa: SIM115  # close() closes it, which ends the lock
        try:
            self._begin(job, ending)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, job: Mapping[str, Any], ending: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"--to {self._folder} is being written by another conversion", hint="Wait for it, or end it."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        begin = {"kind": "job", "digest": _digest_of(job), **job}
        if not lines[0] or not _is_whole(lines[0]):
            self._check_empty(ending, "")
            self._file.truncate(0)
            self._file.write(json.dumps(begin).encode() + b"\n")
        else:
            first, *others = map(json.loads, filter(_is_whole, lines))
            before = [first, *(kept for kept in others if kept["kind"] == "job")][-1]
            _check_same(self._folder, before, job)
            if lines[-1]:  # the conversion was killed while it wrote this line
                self._file.write(b"\n")
            for kept in others:
                if kept.pop("kind") == "shard" and self._is_there(written := Written(**kept)):
                    self.done[written.shard] = written
            self._check_empty(ending, _PREFIX)
            if before["digest"] != begin["digest"]:
                self._file.write(json.dumps(begin).encode() + b"\n")
        self._file.flush()
        for path in self._folder.glob(f".{_PREFIX}*.tmp"):
            path.unlink()  # of a conversion that was killed

    def _is_there(self, written: Written) -> bool:
        try:
            return not written.num_bytes or (self._folder / written.shard).stat().st_size == written.num_bytes
        except FileNotFoundError:
            return False

    def _check_empty(self, ending: str, but: str) -> None:
        """Raise OptionError for files that a glob over the shards would find, and that this conversion has not made.

        ``but``: what the names of its own files begin with; "": it has made none.
        """
        found = [path.name for path in sorted(self._folder.glob(f"*{ending}")) if not path.name.startswith(".")]
        others = [name for name in found if not but or not name.startswith(but)]
        if others:
            raise OptionError(
                f"--to {self._folder} holds other files: {others[0]}" + (", …" if len(others) > 1 else ""),
                hint="A glob over the shards would find them, too. Choose another folder, or remove them.",
            )

    def close(self) -> None:
        """Unlock the folder: other conversions may write there."""
        self._file.close()


def _is_whole(line: bytes) -> bool:
    """Whether a line was written to its end."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _digest_of(job: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _check_same(folder: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if kept.get("on_corrupt") == "raise":
        now = {**now, "on_corrupt": "raise"}  # nothing was left out of shards that are whole: "skip_record" may go on
    if kept.get("digest") == _digest_of(now):
        return
    differ = sorted(key for key in now if kept.get(key) != now[key])
    what = "; ".join(_changed(key, kept.get(key), now[key]) for key in differ)
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
