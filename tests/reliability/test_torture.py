"""The kill test, briefly: see ``torture.py`` for the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torture import KINDS, torture


@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_whatever_is_killed_each_record_comes_once_and_in_order(tmp_path: Path):
    figures = torture(tmp_path, KINDS, 20)
    assert figures.signals.total() >= 20 and figures.epochs and figures.workers_restarted
    assert figures.is_clean, figures
