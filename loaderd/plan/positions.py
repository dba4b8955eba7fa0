"""Where a consumer stands, and how it goes on from there.

A position is an epoch and the number of a batch in it. Its other fields say what these numbers mean: the number of
hosts and the batch size that they were counted with, what a different number of hosts had taken of the epoch before,
and which data and order they belong to. So a position can be kept in a file and read by another process, and a loader
of other data refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from loaderd.errors import OptionError
from loaderd.options import DEFAULT_BLOCK_RECORDS, MAX_EPOCHS, MAX_STEP, StreamOptions, as_count, require
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import HostChanges, Listing, Pass, check_changes, listing_of, pass_of, past_of
from loaderd.plan.shares import EpochRemainder, HostShare, split_evenly
from loaderd.redaction import shown

_VERSION = 1
_MOST_SHOWN = 20
"""Differences that an error names."""
_SHUFFLED = re.compile(r"in blocks of (\d{1,20}), in windows of (\d{1,20})")
"""As :func:`order_of` says it."""
_SHORTER = "Give fewer epochs: a pass of epochs=None begins in epoch 0."


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch that a consumer will take: number ``batch`` (from 0) of ``epoch`` (from 0).

    From ``Loader.position``, for ``Loader(…, start=…)`` and ``Loader.load_state_dict``. It is the same on all hosts.
    One that is made by hand needs ``epoch`` and ``batch`` only, and is then not compared with the data that it is
    used for. Where the number of hosts changed in the middle of the epoch, ``batch`` counts from that change on.
    """

    epoch: int = 0
    batch: int = 0
    hosts: int | None = field(default=None, repr=False)
    """The number of hosts with which ``batch`` was counted; None: that of the loader."""
    batch_size: int | None = field(default=None, repr=False)
    """The batch size with which ``batch`` was counted; None: that of the loader."""
    first_epoch: int | None = field(default=None, repr=False)
    """The epoch with which the pass began, if it matters; None: passes begin at the multiples of ``epochs``."""
    epochs: int | None = field(default=None, repr=False)
    """How many epochs the pass has (0: it never ends), if that matters to a loader with more or fewer; else None."""
    past: HostChanges = field(default=(), repr=False)
    """How many rows each host took of epoch ``first_epoch``: a tuple for each change of the number of hosts."""
    listing: Listing | None = field(default=None, repr=False)
    """Where data sets grow: the shards that the epoch is made of; None: those that there are when it begins."""
    of: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What it belongs to: the shards, the schema's stored features, the seed, …; empty: nothing is compared."""

    def __post_init__(self) -> None:
        for what in ("epoch", "batch"):
            value = as_count(getattr(self, what), f"Position.{what}", "an integer from 0 on", 0)
            object.__setattr__(self, what, value)
        for what, least, must in (
            ("hosts", 1, "a positive integer or None"),
            ("batch_size", 1, "a positive integer or None"),
            ("epochs", 0, "an integer from 0 on or None"),
            ("first_epoch", 0, f"an integer from 0 to {self.epoch} or None"),
        ):
            if getattr(self, what) is not None:
                object.__setattr__(self, what, as_count(getattr(self, what), f"Position.{what}", must, least))
        is_first = self.first_epoch is None or self.first_epoch <= self.epoch
        require(is_first, "Position.first_epoch", f"an integer from 0 to {self.epoch} or None", self.first_epoch)
        object.__setattr__(self, "past", past_of(self.past))
        object.__setattr__(self, "listing", listing_of(self.listing))
        require(isinstance(self.of, Mapping), "Position.of", "a dict", self.of)

    def to_json(self) -> str:
        """One line of JSON, about 400 characters."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """The position that :meth:`to_json` wrote; raises OptionError for anything else."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
            if values.pop("version", None) != _VERSION:
                raise ValueError(f"its version is not {_VERSION}")
            if values.keys() != (names := {each.name for each in fields(cls)}):
                raise ValueError(f"it must have {sorted(names)}")
            return cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(
                f"a position must be what Position.to_json() wrote, got {shown(text, 200)}: {error!s:.200}",
            ) from None


def position_of(state: Any, what: str) -> Position:
    """The position in what ``state_dict()`` of a loader, or of a binding's batches, returned; or ``state`` itself.

    ``what``: how the OptionError calls it that is raised for anything else.
    """
    if isinstance(state, Position):
        return state
    text = state.get("position") if isinstance(state, Mapping) else None
    if not isinstance(text, str):
        array = np.empty(0)
        with suppress(Exception):  # of what anybody may have written into a checkpoint
            array = np.asarray(text)  # the characters, of a binding whose checkpoints hold arrays alone
        hint = "Of a text: json.loads(text), or of what to_json() wrote, loaderd.Position.from_json(text)."
        hint = hint if isinstance(state, (str, bytes)) else ""
        require(array.dtype == np.uint8, what, "what state_dict() returned, or a loaderd.Position", state, hint)
        text = array.tobytes()
    return Position.from_json(text)


def order_of(options: StreamOptions, window_records: int) -> dict[str, Any]:
    """What a position says in ``of`` of the order of a stream with windows of so many rows."""
    order = f"in blocks of {options.block_records}, " if options.shuffle else "none, "
    return {"seed": options.seed, "shuffle": f"{order}in windows of {window_records}"}


class PassSequence:
    """The sequence of all passes of a loader, and where in it a position is. Pure arithmetic."""

    def __init__(
        self,
        options: StreamOptions,
        num_records: int,
        window_records: int,
        of: Mapping[str, Any],
        listing: Listing | None = None,
    ) -> None:
        """``of``: what a position's ``of`` is compared with.

        ``listing``: if data sets grow, the shards with these ``num_records``; then each epoch is a pass of its own.
        """
        self._options = options if listing is None else replace(options, epochs=1)
        self.listing = listing
        self._num_records = num_records
        self._window_records = window_records
        self._of = of
        self.batches = lru_cache(maxsize=16)(self._batches)

    def _batches(self, pass_: Pass, host: int | None = None) -> BatchPlan:
        """The batches of a pass on this host, or on another one."""
        own, num_hosts = self._options.shard
        rest = self._rest_after(pass_.past)
        share = HostShare(rest, own if host is None else host, num_hosts, self._window_records)
        return BatchPlan(share, self._options.batch_size, self._options.remainder, pass_.epochs)

    def _rest_after(self, past: HostChanges) -> EpochRemainder:
        """What is left of an epoch after ``past``. Raises OptionError if the hosts cannot have taken that."""
        rest = EpochRemainder(self._num_records)
        for taken in past:
            all_have = all(rows <= split_evenly(rest.size, len(taken), host) for host, rows in enumerate(taken))
            even = max(taken) - min(taken) <= self._window_records  # all have taken the same number of batches
            if not all_have or not even or sum(taken) >= rest.size:
                raise OptionError(f"{len(taken)} hosts cannot have taken {taken!r:.200} of {rest.size} records")
            rest = rest.after(taken, self._window_records)
        return rest

    def pass_to_json(self, pass_: Pass) -> str:
        """A pass as text, with what its steps depend on: the data, the hosts, the batch size."""
        return json.dumps({"pass": pass_, "of": self._counted})

    def pass_from_json(self, text: str | bytes) -> Pass:
        """The pass that :meth:`pass_to_json` wrote. Raises OptionError if its steps are other batches here."""
        of, fields_of_pass = _fields_in(text)
        compare(of, self._counted)
        return pass_of(fields_of_pass)

    @property
    def _counted(self) -> dict[str, Any]:
        """``position_of_pass`` knows the names."""
        return {**self._of, "hosts": self._options.shard[1], "batch_size": self._options.batch_size}

    def next_pass(self, pass_: Pass) -> Pass:
        """The whole pass behind this one (behind one that never ends: from its second epoch on)."""
        following = self._pass_from(pass_.first_epoch + (pass_.epochs or 1), ())
        return following if self.listing is None else following._replace(listing=None)

    def _pass_from(self, epoch: int, past: HostChanges) -> Pass:
        """From ``epoch`` to the end of its pass. Passes have ``epochs`` epochs each, from epoch 0 on."""
        epochs = self._options.epochs
        return Pass(epoch, None if epochs is None else epochs - epoch % epochs, past, self.listing)

    def is_whole(self, pass_: Pass, step: int) -> bool:
        """Whether all batches of the pass come from ``step`` on, and the pass has all of its ``epochs`` epochs."""
        return step == 0 and not pass_.past and pass_.epochs == self._options.epochs

    # -------------------------------------------------------------------------------------- to a position

    def position(self, pass_: Pass, step: int) -> Position:
        """Where a consumer stands that will take batch ``step`` of a pass next."""
        num_hosts, batch_size = self._options.shard[1], self._options.batch_size
        epoch, batch = self.batches(pass_).place_of(step)
        here = Position(pass_.first_epoch + epoch, batch, num_hosts, batch_size, of=self._of)
        # If batches go on over the ends of epochs, it matters where they began, also to a loader with more epochs.
        carries = self._options.remainder == "carry"
        if epoch == pass_.epochs:  # behind the pass: the next one begins here
            return replace(here, first_epoch=here.epoch) if carries else here
        here = replace(here, listing=pass_.listing)
        past = pass_.past if epoch == 0 or carries else ()
        epochs = (pass_.epochs or 0) if carries and step else None
        return replace(here, first_epoch=pass_.first_epoch, epochs=epochs, past=past) if past or carries else here

    def after(self, position: Position, batches: int) -> Position:
        """The position so many batches later, maybe in a later pass.

        Raises OptionError as :meth:`find`; for data that grow, also if it lies inside a later epoch.
        """
        pass_, step = self.find(position)
        step += as_count(batches, "batches", "an integer from 0 on", 0)
        if (num_steps := self.batches(pass_).num_steps) is not None and step >= num_steps:
            step -= num_steps
            if self.listing is not None and step:
                raise OptionError(
                    f"the data set grows: a position {step} batches beyond the end of its epoch cannot be computed"
                )
            pass_ = self.next_pass(pass_)
            if self.listing is None and (num_steps := self.batches(pass_).num_steps) is not None:
                passes, step = divmod(step, num_steps)  # from here on, all are of equal length
                pass_ = self._pass_from(pass_.first_epoch + passes * (pass_.epochs or 1), ())
        return self.position(pass_, step)

    # ------------------------------------------------------------------------------------ from a position

    def find(self, position: Position) -> tuple[Pass, int]:
        """The pass and the step of a position. Raises OptionError where it is of other data, or does not exist."""
        check_epoch(position.epoch)
        if position.of:
            compare(position.of, self._of)
        num_hosts, batch_size = self._options.shard[1], self._options.batch_size
        was_hosts, was_batch_size = position.hosts or num_hosts, position.batch_size or batch_size
        first_epoch = position.first_epoch
        if first_epoch is None:
            epochs = self._options.epochs
            first_epoch = 0 if epochs is None else position.epoch - position.epoch % epochs
        pass_ = self._pass_from(first_epoch, position.past)
        was_pass = pass_ if position.epochs is None else pass_._replace(epochs=position.epochs or None)
        if (was_hosts, was_batch_size) == (num_hosts, batch_size) and self._agree(pass_, was_pass, position):
            return pass_, self._step(self.batches(pass_), pass_, position)
        least = was_hosts * (1 if self._options.remainder == "short" else was_batch_size)
        if least > self._num_records:
            raise OptionError(
                f"the position counts in batches of {was_batch_size} on {was_hosts} hosts, "
                f"and there are {self._num_records} records"
            )
        check_changes([*map(len, position.past), was_hosts])
        then = replace(self._options, shard=(0, was_hosts), batch_size=was_batch_size)
        before = PassSequence(then, self._num_records, self._window_records, self._of, self.listing)
        step = self._step(before.batches(was_pass), was_pass, position)
        epoch = position.epoch - first_epoch
        taken = dict(before.batches(was_pass, host).taken_of(epoch, step) for host in range(was_hosts))
        past = position.past if epoch == 0 else ()
        if any(taken.values()):
            past = (*past, tuple(taken[host] for host in range(was_hosts)))
        return self._pass_from(position.epoch, past), 0

    def _agree(self, one: Pass, other: Pass, position: Position) -> bool:
        """Whether two passes that differ in ``epochs`` alone have had the same rows in front of a position."""
        if one == other:
            return True
        epoch = position.epoch - one.first_epoch
        goes_on = all(each.epochs is None or epoch < each.epochs for each in (one, other))
        step = self.batches(one).step_at(epoch, position.batch)
        return goes_on and not any(self.batches(each).is_made_to_end(step) for each in (one, other))

    def _step(self, batches: BatchPlan, pass_: Pass, position: Position) -> int:
        epoch = position.epoch - pass_.first_epoch
        step = batches.step_at(epoch, position.batch)
        is_behind = batches.num_steps is not None and step > batches.num_steps
        if epoch < 0 or is_behind or batches.place_of(step) != (epoch, position.batch):
            raise OptionError(
                f"the position does not exist: there is no batch {position.batch} in epoch {position.epoch}",
                hint=f"A whole epoch has {batches.steps_per_epoch} batches of {batches.batch_size}, counted from 0.",
            )
        require(step <= MAX_STEP, "the number of a batch in its pass", f"at most {MAX_STEP}", step, _SHORTER)
        return step


def check_epoch(epoch: int) -> None:
    """Raise OptionError where no pass can begin in an epoch, whatever the data are."""
    require(epoch < MAX_EPOCHS, "the epoch to begin with", f"at most {MAX_EPOCHS - 1}", epoch)


def position_of_pass(text: str | bytes) -> Position:
    """A position in the data of the pass that :meth:`PassSequence.pass_to_json` wrote."""
    of, fields_of_pass = _fields_in(text)
    of = {name: value for name, value in of.items() if name not in ("hosts", "batch_size")}
    return Position(listing=pass_of(fields_of_pass).listing, of=of)


def _fields_in(text: str | bytes) -> tuple[dict[str, Any], Any]:
    """What a pass as text belongs to, and its fields. Raises OptionError."""
    try:
        values = json.loads(text)
        of, fields_of_pass = values["of"], values["pass"]
        is_written = isinstance(of, dict)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_written = False
    require(is_written, "a pass", "what PassSequence.pass_to_json() wrote", text)
    return of, fields_of_pass


def compare_listings(then: Listing | None, now: Listing | None) -> None:
    """Raise OptionError if the shards that a position names are not those that were found."""
    if then is not None and now != then:
        raise OptionError(
            f"the position belongs to other data: to the shards {then!s:.200}, and those there now are {now!s:.200}",
            hint="Bring them back, or go without the position.",
        )


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OptionError, which names what differs, if a position of ``then`` does not belong to what is there now."""
    names = [*now, *[name for name in then if name not in now]]
    differences = [
        f"  {name:.100}: {then.get(name, 'nothing')!s:.200} when the position was taken, "
        f"{now.get(name, 'nothing')!s:.200} now"
        for name in names
        if then.get(name) != now.get(name)
    ]
    if differences:
        order, option = _SHUFFLED.fullmatch(str(then.get("shuffle"))), ""
        if order is not None and order[0] != now.get("shuffle"):
            blocks = "" if order[1] == str(DEFAULT_BLOCK_RECORDS) else f", block_records={order[1]}"
            option = f" (shuffle=loaderd.Shuffle(window_records={order[2]}{blocks}))"
        raise OptionError(
            "the position belongs to other data or to another order:\n" + "\n".join(differences[:_MOST_SHOWN]),
            hint=f"Give what it was taken with{option}, or go without it.",
        )
