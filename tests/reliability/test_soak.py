"""The soak, briefly: see ``soak.py`` for the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.reliability import soak as soak_script
from tests.reliability.soak import Figures, compare, soak


@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_nothing_grows_while_workers_are_killed(tmp_path: Path):
    figures = soak(tmp_path, 200_000, "loader", sizes=[10_000] * 2, kill_every=50_000, sample_every=4_000)
    assert (figures.epochs, figures.wrong_sums) == (10, 0) and figures.workers_killed
    for who in ("consumer", "daemon", "worker"):
        for quantity in ("threads", "fds", "shared_mib"):
            first, last = figures.flat[f"{who} {quantity}"]
            assert first == last, (who, quantity, figures)
        first, last = figures.flat[f"{who} rss_mib"]
        assert last < first + 10, (who, figures)


def test_the_last_sixth_is_compared_with_the_first():
    samples = [(records, {"fds": float(records)}) for records in range(0, 1001, 5)]
    assert compare(samples) == {"fds": (175.0, 925.0)}


def test_a_short_run_without_a_sample_has_nothing_to_compare():
    assert compare([]) == {}


@pytest.mark.parametrize("sizes", [[10, 9, 10], [10, 11, 10]], ids=["lost", "again"])
def test_an_epoch_with_a_record_too_few_or_too_many_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
):
    """Batches of ten records, of which two are an epoch of 20: the right sum of the first, then a hundred others."""
    batches = [(10, 45), (10, 145), *((size, 95) for size in sizes * 33)]
    monkeypatch.setattr(soak_script, "sums_of", lambda *_, **__: iter(batches))
    figures = soak(tmp_path, 400, "loader", sizes=[20], kill_every=10_000, sample_every=100)
    assert figures.epochs == 20 and figures.wrong_sums
    assert figures.records < 420 and figures.samples, "it ends where the epoch does"


_WHOLE = {"records": 400, "epochs": 1}


@pytest.mark.parametrize(
    ("figures", "status"), [({}, 1), (_WHOLE, 0), ({**_WHOLE, "wrong_sums": 1}, 1), ({**_WHOLE, "records": 399}, 1)]
)
def test_the_status_tells_whether_all_came_and_were_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, figures: dict[str, int], status: int
):
    caplog.set_level("WARNING", "loaderd")  # which is undone behind the test, and so what the script sets is
    monkeypatch.setattr(soak_script, "soak", lambda *_, **__: Figures("loader", **figures))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--records", "400"])
    assert soak_script.main() == status
