"""Games of Leela Chess Zero, for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lc0_files import lc0_games, write_tar  # noqa: F401  (fixtures)
