"""A stream of batches, as a loader sees it, wherever the batches come from."""

from __future__ import annotations

import subprocess
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from loaderd.client.batch import Batch
from loaderd.client.shutdown import ProgramEnded, end_with_program, program_has_ended
from loaderd.client.skipped_data import SkippedData
from loaderd.errors import ClosedError, LoaderdError
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing, Pass
from loaderd.plan.positions import PassSequence, Position
from loaderd.schema import Schema
from loaderd.shm.page import COPIES_AHEAD, DEVICE_WAIT_NS
from loaderd.shm.samples import PageView


@dataclass
class StreamCounts:
    """What a stream has delivered, over all daemons that it has had: fields of ``Statistics``."""

    batches_delivered: int = 0
    records_delivered: int = 0
    batches_copied: int = 0
    starts: int = 0
    wait_s: float = 0.0
    device_wait_s: float = 0.0
    workers_restarted: int = 0
    daemon_restarts: int = 0


class Stream(ABC):
    """For one thread at a time, which holds ``lock``. Any thread may call :meth:`close` at any time, without it.

    ``schema``, ``options`` and ``grows`` (whether each epoch is made of the shards that there are when it begins)
    say what it delivers.
    """

    schema: Schema
    options: StreamOptions
    grows: bool
    pass_sequence: PassSequence
    """The arithmetic of passes and positions, for the data in use."""

    def __init__(self, skipped: SkippedData) -> None:
        self.counts = StreamCounts()
        self.skipped = skipped
        self.lock = threading.Lock()
        """Held by the thread that asks for a batch."""
        self._over: str | type[ProgramEnded] | None = None
        end_with_program(self)

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Fields of ``Statistics``: sizes."""

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return 0

    @property
    def watched(self) -> PageView | None:
        """Its page; None where there is none, and in a group."""
        return None

    @abstractmethod
    def pass_sequence_of(self, of: Pass | Position) -> PassSequence:
        """The :attr:`pass_sequence` of the data that a pass or a position belongs to. Raises LoaderdError.

        Where :meth:`has_pass_sequence_of` returns False, it may list shards, which changes the data in use.
        """

    def has_pass_sequence_of(self, of: Pass | Position) -> bool:
        """Whether :meth:`pass_sequence_of` can answer at once; may be asked without ``lock``."""
        return True

    @abstractmethod
    def list_shards(self, listing: Listing | None) -> None:
        """Where data sets grow, use the shards that there are now, or those of ``listing``.

        Raises LoaderdError; then nothing has changed.
        """

    def use_data_of(self, position: Position) -> None:  # noqa: B027 - only a server knows earlier shards
        """Before the first batch is asked for: use the shards that a position belongs to, if a server knows them.

        Raises OptionError where they are not what they were; then nothing has changed.
        """

    @abstractmethod
    def fetch(self, pass_: Pass, step: int) -> Batch | LoaderdError:
        """Batch ``step`` of a pass, which has one; or why it cannot be delivered."""

    def num_empty(self, begin: tuple[int, int], last: tuple[int, int]) -> int:
        """How many batches were passed over, because no record was left of them.

        From ``begin`` to ``last``, both included: each the first epoch of a pass, and a step.
        """
        return 0

    def count_device_wait(self, waited_ns: int, ahead: int) -> None:
        """Count that the consumer waited ``waited_ns`` for a copy to a device; ``ahead`` copies are begun early."""
        self.counts.device_wait_s += waited_ns / 1e9
        if self.watched is not None:
            words = self.watched.page.words
            words[DEVICE_WAIT_NS] += waited_ns
            words[COPIES_AHEAD] = ahead

    def _delivered(self, batch: Batch) -> Batch:
        """Count ``batch``, which the consumer gets."""
        self.counts.batches_delivered += 1
        self.counts.records_delivered += batch.num_records
        return batch

    # -------------------------------------------------------------------------------------------- end

    def end(self, why: str | type[ProgramEnded]) -> None:
        """Mark it as over, and wake threads that wait for it. Does not wait, and may be called again."""
        self._over = self._over or why

    @property
    def is_over(self) -> bool:
        """Whether it gives no batches any more."""
        return self._over is not None

    def check(self) -> None:
        """Raise ClosedError where it is over."""
        if isinstance(self._over, str):
            raise ClosedError(self._over, hint="Make a new one.")
        if self._over is not None or program_has_ended():
            raise ProgramEnded

    def close(self) -> None:
        """End it, and give back what it has. From any thread; a wait in another one raises ClosedError."""
        self.end("the loader is closed")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes that end with it."""
        return []

    def leave_to_parent(self) -> None:
        """For a fork of the process: the stream is the parent's."""
        self.lock = threading.Lock()  # a thread that held it is not in the fork
