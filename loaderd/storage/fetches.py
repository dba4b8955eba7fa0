"""Blocks of remote shards that are on their way: fetched ahead of their use, neighbours in one request."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from loaderd.storage.access import Access
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from concurrent.futures import Future

# Blocks that are no further apart are fetched in one request: to read the gap costs less than a second request.
_MOST_GAP_BYTES = 64 << 10
# Larger requests are slower than several smaller ones at a time.
_MOST_JOINED_BYTES = 2 << 20
_MOST_AHEAD_BYTES = 64 << 20

_Key = tuple[int, int, int]
"""(shard, offset, bytes) of a block."""
_Fetch = tuple["Future[bytes]", int, float]
"""(answer, where the block begins in it, when it was asked for) of a block on its way."""


class Fetches:
    """The fetches of blocks of ``files``, for use in one thread."""

    def __init__(self, files: list[ShardFile], access: Access) -> None:
        self._files, self._access = files, access
        self._fetches: dict[_Key, _Fetch] = {}
        self._ahead_bytes = 0

    def begin(self, blocks: Iterable[_Key], most_ahead_bytes: int = _MOST_AHEAD_BYTES) -> None:
        """Have blocks fetched for one :meth:`take_into`; no more once ``most_ahead_bytes`` are on their way."""
        new: dict[_Key, None] = {}
        for key in blocks:
            if key not in self._fetches and key not in new and self._ahead_bytes < most_ahead_bytes:
                self._ahead_bytes += key[2]
                new[key] = None
        for joined in _joined(list(new)):
            shard, begin, _ = joined[0]
            stop = max(offset + num_bytes for _, offset, num_bytes in joined)
            answer = self._access.fetch(self._files[shard], begin, stop - begin)
            answer.add_done_callback(lambda _: self._access.on_arrival())
            for key in joined:
                self._fetches[key] = answer, key[1] - begin, time.monotonic()

    def are_there(self, blocks: Iterable[_Key]) -> bool:
        """Whether all that was begun of ``blocks`` has come, or was asked for longer ago than an answer may take."""
        oldest_s = time.monotonic() - self._access.limit_s
        fetches = [self._fetches[key] for key in blocks if key in self._fetches]
        return all(answer.done() or asked_s < oldest_s for answer, _, asked_s in fetches)

    def take_into(self, blocks: list[_Key], views: list[memoryview]) -> None:
        """Write each block to its view, when it has come. Raises ShardReadError and StorageError."""
        self.begin(blocks, sys.maxsize)
        fetches = {key: self._fetches.pop(key) for key in dict.fromkeys(blocks)}
        self._ahead_bytes -= sum(num_bytes for _, _, num_bytes in fetches)
        for key, view in zip(blocks, views, strict=True):
            answer, start, _ = fetches[key]
            try:
                data = self._access.wait(self._files[key[0]].uri, answer)
            except BaseException:
                self.forget()  # the next call is to ask storage again
                raise
            view[:] = memoryview(data)[start : start + key[2]]

    def forget(self) -> None:
        """Forget all that is on its way."""
        self._fetches.clear()
        self._ahead_bytes = 0


def _joined(blocks: list[_Key]) -> list[list[_Key]]:
    """Blocks in groups, one for each request."""
    groups: list[list[_Key]] = []
    for key in sorted(blocks):
        shard, offset, num_bytes = key
        if groups:
            first, (_, before, before_bytes) = groups[-1][0], groups[-1][-1]
            is_near = shard == first[0] and offset - (before + before_bytes) <= _MOST_GAP_BYTES
            if is_near and offset + num_bytes - first[1] <= _MOST_JOINED_BYTES:
                groups[-1].append(key)
                continue
        groups.append([key])
    return groups
