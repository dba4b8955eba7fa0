"""The soak, briefly: see ``soak.py`` for the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import compare, soak


@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_nothing_grows_while_workers_are_killed(tmp_path: Path):
    figures = soak(tmp_path, 200_000, "loader", sizes=[10_000] * 2, kill_every=50_000, sample_every_s=0.05)
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
