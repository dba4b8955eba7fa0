"""Requests that are not answered: since when, how many have failed, and which errors are answers."""

from __future__ import annotations

import errno
import time

import pytest

from loaderd.errors import ShardReadError
from loaderd.snapshots import Outage
from loaderd.storage.outage_tracker import OutageTracker

NOT_YET_S = 1.0


def outage_of(tracker: OutageTracker) -> Outage:
    """When there is one."""
    until_s = time.monotonic() + 60
    while (found := tracker.outage) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return found


def fail(tracker: OutageTracker, error: Exception, place: str = "s3://b/a") -> None:
    def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        tracker.watch(place, ask)


def test_an_outage_begins_with_the_first_request_and_ends_with_an_answer():
    tracker = OutageTracker()
    tracker.begin()
    assert tracker.outage is None, "each request takes some time"
    silent = outage_of(tracker)
    assert silent.for_s >= NOT_YET_S and silent[1:] == (0, "")
    tracker.begin()
    fail(tracker, OSError("503 Slow Down."), "s3://KEY:SECRET@b/a?region=x at byte 5")
    fail(tracker, OSError("504"))
    later = outage_of(tracker)
    assert later.for_s >= silent.for_s and later[1:] == (2, "s3://b/a: 504")
    assert tracker.watch("s3://b/a", lambda: 7) == 7
    assert tracker.outage is None
    fail(tracker, OSError("503 Slow Down."), "s3://KEY:SECRET@b/a?region=x at byte 5")
    assert outage_of(tracker)[1:] == (1, "s3://***@b/a at byte 5: 503 Slow Down")


@pytest.mark.parametrize(
    ("error", "is_answer"),
    [
        (FileNotFoundError("gone"), True),
        (ShardReadError("changed"), True),
        (OSError(errno.EACCES, "may not"), True),
        (OSError(errno.EIO, "failed"), False),
        (OSError("AWS Error ACCESS_DENIED"), False),
        (ConnectionError(), False),
    ],
)
def test_what_an_error_says_of_a_file_is_an_answer(error: Exception, is_answer: bool):
    tracker = OutageTracker()
    tracker.begin()
    outage_of(tracker)
    fail(tracker, error)
    assert (tracker.outage is None) == is_answer
