"""A stream whose batches go to whichever of a group's consumers asks for the next one.

::

    join ──► Joined: the group's pass, and its mark ──► want ──► a batch ──► want ──► … ──► the pass is over for all
      ▲                                                                     │
      └────────── with what we have had since the mark ◄── the link is lost ┘

Everything before the mark is used up, by one consumer or another. The batches from the mark on that this one has had
are in ``_taken``. When it joins, it tells the server of them: a server that was started anew cannot know of them
otherwise. A batch is used up when its slot is released, or when it was copied. A slot that the consumer uses no more
is released when it asks for the next batch, or when it has left its loop (``returner``). When a consumer goes, the
server lends the batches that it still had to another one. So each batch comes at least once to somebody, and only
what was under way when a consumer went may come twice.

A batch is asked for when it is needed, and none ahead: the server takes the request to mean that this consumer has
used what it had. Else the pass could be over while a consumer still uses its last batch, and that batch would be lost
if the consumer died.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loaderd.client.batch import Batch, HandOver
from loaderd.client.end import ProgramEnds
from loaderd.client.link import LinkLost
from loaderd.client.returner import Returner
from loaderd.client.sources import Source
from loaderd.client.supervised import SupervisedStream
from loaderd.errors import EmptyBatchError, LoaderdError
from loaderd.plan.passes import Pass
from loaderd.plan.positions import Position
from loaderd.progress import ProgressDisplay


class SharedStream(SupervisedStream):
    """See the module's docstring. Threads, ends and interrupts are as in SupervisedStream."""

    def __init__(self, source: Source, start: Position, progress: ProgressDisplay) -> None:
        self._returner = Returner(self)
        super().__init__(source, start, progress)
        self._pass, self._mark = self.course.find(start)
        self._taken: set[int] = set()
        self._is_member = False
        self._has_asked = False
        self._returner.start()

    @property
    def place(self) -> tuple[Pass, int]:
        """The group's pass, and the step before which everything is used up."""
        return self._pass, self._mark

    def take(self, of: Pass | None) -> tuple[Pass, int, Batch | LoaderdError] | None:
        """(pass, step, batch) of the next batch of the pass ``of``, or an error in its place; None: the pass is over.

        ``of`` None: of whichever pass the group is at. The stream is torn until :meth:`keep`.
        """
        while True:
            if of is not None and of != self._pass:
                return None
            try:
                if not self._is_member or self._now.torn or self._over is not None:
                    self._join()
                    continue
                connection = self._now
                connection.torn = True
                if not self._has_asked:
                    self._has_asked = True
                    connection.want(1)
                item = self._take(connection)
                self._has_asked = False
                self._follow()
                if isinstance(item, Batch):
                    self.empty.in_a_row = 0
                elif isinstance(item, EmptyBatchError):
                    item = self._pass_over(self._pass, connection.step, item)
                    if isinstance(item, EmptyBatchError):
                        self.keep(connection.step)
                        continue
            except LinkLost as lost:
                self._is_member = False
                self._open_for(self._pass, lost, self._mark)
            else:
                if item is not None:
                    return self._pass, connection.step, item
                self._pass, self._mark = self.course.next_pass(self._pass), 0
                self._taken.clear()
                self._is_member = False
                connection.torn = False
                return None

    def keep(self, step: int) -> None:
        """The consumer has batch ``step``, which :meth:`take` returned."""
        self._taken.add(step)
        self._now.torn = False

    def give_up(self, step: int) -> None:
        """The consumer does not get batch ``step``, which :meth:`take` returned: the server must lend it again."""
        self._now.torn = True
        self._taken.discard(step)

    def watch(self, iteration: SharedIteration) -> None:
        """When its iterations are over or gone, slots go back as soon as the consumer lets go of them."""
        self._returner.watch(iteration)

    def give_back(self) -> Sequence[object]:
        """Give back slots that the consumer has let go of; return the leases of those that it holds."""
        connection = self._now
        if connection.torn:  # another one replaces it, and its slots are of no use then
            return []
        held = connection.reader.leases()
        connection.give_back()
        return held

    def end(self, why: str | type[ProgramEnds]) -> None:
        super().end(why)
        self._returner.end()

    def _join(self) -> None:
        self.check()
        self._is_member = False
        if self._now.torn:
            self._open_for(self._pass, None, self._mark)
        self._has_asked = False
        self._now.join(self._pass, self._mark, self._taken)
        self.counts.starts += 1
        self._follow()
        self._is_member = True
        self._now.torn = False

    def _follow(self) -> None:
        """Take over where the group is."""
        pass_, mark = self._now.joined
        if pass_ != self._pass:
            self._taken.clear()
        elif mark > self._mark:
            self._taken = {step for step in self._taken if step >= mark}
        self._pass, self._mark = pass_, mark


class SharedIteration(Iterator[Any]):
    """The batches of a pass that this consumer gets. Several threads may share it: each batch goes to one."""

    def __init__(self, stream: SharedStream, hand_over: HandOver) -> None:
        self._stream = stream
        self._hand_over = hand_over
        self._pass: Pass | None = None
        self.is_over = False
        """Whether it has come to the end of its pass."""
        stream.watch(self)

    def __next__(self) -> Any:
        taken = None
        try:
            with self._stream.lock:
                found = None if self.is_over else self._stream.take(self._pass)
                if found is None:
                    self.is_over = True
                    raise StopIteration
                self._stream.counts.skips.warn()  # if that raises, the server lends the batch again
                self._pass, step, item = found
                error, element = (item, None) if isinstance(item, LoaderdError) else (None, self._hand_over(item)())
                taken = step
                self._stream.keep(taken)
        except BaseException as error:
            if taken is not None:  # Ctrl-C came before the consumer had the batch
                self._stream.give_up(taken)
            if isinstance(error, ProgramEnds):
                raise error.for_thread() from None
            raise
        # Nothing is called from here on, so Ctrl-C can only come when the consumer has the batch.
        if error is not None:
            raise error
        return element
