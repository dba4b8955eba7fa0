"""Where a consumer stands in its data: passes, and positions in them."""

from __future__ import annotations

from typing import Any

from loaderd.client.batch_source import Stream
from loaderd.errors import OptionError
from loaderd.options import StreamOptions, as_count, require
from loaderd.plan.passes import Pass
from loaderd.plan.positions import PassSequence, Position, check_epoch, position_of_pass


class StreamPosition:
    """Where a loader stands: the pass that comes next, and the batch that the consumer will take next."""

    def __init__(self, stream: Stream, options: StreamOptions, grows: bool, start: Position) -> None:
        self._stream = stream
        self._options = options
        self.grows = grows
        """Whether each epoch is made of the shards that there are when it begins."""
        self._next = stream.pass_sequence.find(start)
        self._here: tuple[Pass, int] | None = self._next
        self._first_pass = self._next[0]
        self._is_placed = start != Position()  # or by seek(), and no pass has begun since

    @property
    def passes_of_an_iteration(self) -> int | None:
        """How many passes the next iteration makes: 1, or where data sets grow, one for each epoch (None: no end)."""
        if not self.grows or self._options.epochs is None:
            return None if self.grows else 1
        return self._options.epochs - self._next[0].first_epoch % self._options.epochs

    def new_pass(self) -> tuple[Pass, int]:
        """Begin a pass; returns which it is, and the step with which it begins, for :meth:`fetch`."""
        with self._stream.lock:
            return self._new_pass()

    def _new_pass(self) -> tuple[Pass, int]:
        pass_, step = self._next
        check_epoch(pass_.first_epoch)
        if self.grows and pass_.listing is None:
            self._stream.list_shards(None)
            pass_ = pass_._replace(listing=self._stream.pass_sequence.listing)
        self._next = self._stream.pass_sequence.next_pass(pass_), 0
        self._is_placed = False
        return pass_, step

    def num_steps(self, pass_: Pass) -> int | None:
        """The step behind the last one of a pass; None if it never ends."""
        return self._stream.pass_sequence_of(pass_).batches(pass_).num_steps

    @property
    def position(self) -> Position:
        """Where the consumer stands: the batch that it will take next. What was read ahead does not count.

        Raises OptionError where a ``tf.data.Dataset`` takes the batches: it, and whatever is made of it, takes them
        ahead.
        """
        if self._here is None:
            raise OptionError(
                "loader.position is unknown, because a tf.data.Dataset or loader.fetch takes the batches",
                hint="For a tf.data.Dataset save the iterator (tf.train.Checkpoint), use BackupAndRestore, or count: "
                "begin = loader.next_position in front of the loop, loader.after(begin, batches) in it.",
            )
        return self._stream.pass_sequence_of(self._here[0]).position(*self._here)

    @property
    def next_position(self) -> Position:
        """Where the next pass will begin, and so the next iteration."""
        return self._stream.pass_sequence_of(self._next[0]).position(*self._next)

    @property
    def next_is_whole(self) -> bool:
        """Whether the next pass begins at its first step, and is as long as those behind it."""
        return self._stream.pass_sequence.is_whole(*self._next)

    def seek(self, position: Position) -> None:
        """Have the next pass begin at ``position``, and end where it would have ended.

        Raises OptionError where the position is of other data, or does not exist. One from the middle of an epoch on
        another number of hosts, or in other batches, can only be given as ``Loader(…, start=position)``: it may take
        more memory.
        """
        _require_position(position)
        with self._stream.lock:
            self._stream.use_data_of(position)
            pass_, step = self._stream.pass_sequence_of(position).find(position)
        if self.grows and position.listing is None and step == 0:
            pass_ = pass_._replace(listing=None)
        if pass_.past and pass_ != self._first_pass:
            raise OptionError(
                f"a part of epoch {position.epoch} was taken in other batches, or on another number of hosts, than "
                f"this loader's: the position counts batches of {position.batch_size} on {position.hosts}",
                hint="Give it to a new loader: start=position. Or go on as that epoch began, at least until it ends.",
            )
        with self._stream.lock:
            self._next = self._here = pass_, step
            self._is_placed = True

    def seek_iteration(self, number: int) -> None:
        """Have the next iteration be number ``number`` (from 0) of those that a loader makes from its beginning on.

        Where :meth:`seek` or ``start=`` put the loader into that iteration, it stays there. Raises OptionError where
        they put it into a later one, and none has begun since.
        """
        number = as_count(number, "the number of an iteration", "an integer from 0 on", 0)
        epochs = self._options.epochs or 1
        now = self._next[0].first_epoch // epochs
        if self._options.epochs is None and self._is_placed:
            # Iteration n of a loader without an end begins with epoch n: an epoch may be in several.
            now = min(number, self.next_position.epoch)
        if now == number:
            return
        if self._is_placed and now > number:
            here = self.next_position
            raise OptionError(
                f"iteration {number} is asked for, but start=, seek() or load_state_dict() put the loader into "
                f"iteration {now}, at batch {here.batch} of epoch {here.epoch}",
                hint=f"Ask for iteration {now}; or put the loader nowhere, and it begins with the one asked for. "
                f"(accelerate's DataLoaderShard counts from 0 in each process: call its set_epoch({now}).)",
            )
        self.seek(Position(number * epochs, first_epoch=number * epochs))
        self._is_placed = False

    def after(self, position: Position, batches: int) -> Position:
        """The position ``batches`` batches after ``position``, one pass following the other.

        Batches of which no record was left, and which did not come, are not counted, but passed over.
        """
        _require_position(position)
        # Without the lock, if possible: the handler of a signal may ask in the middle of a fetch.
        if self._stream.has_pass_sequence_of(position):
            return self._after(self._stream.pass_sequence_of(position), position, batches)
        with self._stream.lock:
            return self._after(self._stream.pass_sequence_of(position), position, batches)

    def _after(self, pass_sequence: PassSequence, position: Position, batches: int) -> Position:
        def place_of(position: Position) -> tuple[int, int]:
            pass_, step = pass_sequence.find(position)
            return pass_.first_epoch, step

        end, passed = pass_sequence.after(position, batches), 0
        while (empty := self._stream.empty.between(place_of(position), place_of(end))) > passed:
            end, passed = pass_sequence.after(position, batches + empty), empty
        return end

    def pass_to_json(self, pass_: Pass) -> str:
        """A pass as text, with what it belongs to; for :meth:`pass_from_json`, of this loader or of another."""
        return self._stream.pass_sequence.pass_to_json(pass_)

    def pass_from_json(self, text: str | bytes) -> Pass:
        """The pass that ``text`` says; a new pass will begin behind it. Raises OptionError if it is of other data."""
        with self._stream.lock:
            self._stream.use_data_of(position_of_pass(text))
            pass_ = self._stream.pass_sequence.pass_from_json(text)
            if pass_.first_epoch >= self._next[0].first_epoch:
                self._next = self._stream.pass_sequence.next_pass(pass_), 0
        return pass_


def _require_position(value: Any) -> None:
    require(isinstance(value, Position), "position", "a loaderd.Position", value)


def checked_start(start: Position | None) -> Position:
    """Where a loader is to begin. Raises OptionError for what is no position."""
    require(start is None or isinstance(start, Position), "start", "a loaderd.Position", start)
    if start is not None:
        check_epoch(start.epoch)
    return start or Position()
