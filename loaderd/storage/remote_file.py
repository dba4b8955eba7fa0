"""A shard of an object store as a file: for the index pass, and for all reading that need not be fast.

It is fetched in pieces of 1 MiB. Where a reader goes from piece to piece, the next pieces are requested ahead: two,
then four, and so on up to ``Storage.requests``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderd.storage.access import LOOK_EVERY_S, PIECE_BYTES, Access
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from concurrent.futures import Future


class RemoteFile:
    """For use in one thread."""

    def __init__(self, file: ShardFile, access: Access) -> None:
        self._file, self._access = file, access
        first = access.first_piece(file)
        self._pieces: dict[int, Future[bytes]] = {} if first is None else {0: first}
        self._num_pieces = -(-file.size_bytes // PIECE_BYTES)
        self._last, self._ahead = -1, 1

    def check_unchanged(self) -> None:
        if self._last < 0 and 0 in self._pieces:  # its read looks at the object, too: one look is enough
            self._access.wait(self._file.uri, self._pieces[0])
        self._access.look_at(self._file, LOOK_EVERY_S)

    def read_at(self, offset: int, view: memoryview) -> int:
        size = max(0, min(len(view), self._file.size_bytes - offset))
        done = 0
        while done < size:
            number, skipped = divmod(offset + done, PIECE_BYTES)
            part = memoryview(self._piece(number))[skipped:][: size - done]
            view[done : done + len(part)] = part
            done += len(part)
        return size

    def _piece(self, number: int) -> bytes:
        if number == self._last + 1:
            self._ahead = min(2 * self._ahead, self._access.storage.requests)
        elif number != self._last:
            self._ahead = 1
        self._last = number
        wanted = range(number, min(number + self._ahead, self._num_pieces))
        # One that failed ahead is asked for again: that may be long ago.
        pieces = {index: piece for index, piece in self._pieces.items() if index in wanted}
        self._pieces = {index: piece for index, piece in pieces.items() if not (piece.done() and piece.exception())}
        for index in wanted:
            if index not in self._pieces:
                begin = index * PIECE_BYTES
                size = min(PIECE_BYTES, self._file.size_bytes - begin)
                self._pieces[index] = self._access.fetch(self._file, begin, size)
        try:
            return self._access.wait(self._file.uri, self._pieces[number])
        except BaseException:
            self._pieces.clear()  # the next call is to ask storage again
            raise

    def close(self) -> None:
        self._pieces.clear()
