"""The leak test, briefly: see ``leaks.py`` for the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from leaks import ENDS, PHASES, look_for_leaks


@pytest.mark.slow  # tests/endings looks at what each end leaves; at SIGKILL, tests/daemon/test_training_process.py
@pytest.mark.timeout(300)  # seconds, but on a busy machine
def test_nothing_is_left_of_a_training_however_it_ends(tmp_path: Path):
    figures = look_for_leaks(tmp_path, len(PHASES), len(ENDS), seed=0, tensorflow_share=0.0)
    assert figures.most_processes >= 2
    assert figures.is_clean, figures
