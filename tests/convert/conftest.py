"""Shards of every kind, and games of Leela Chess Zero, for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("schemas", "shards"):
    sys.path.insert(0, str(Path(__file__).parent.parent / room))

from lc0_files import lc0_games, write_tar  # noqa: E402, F401  (fixtures)
