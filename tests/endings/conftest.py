"""Puts this folder on the path, and those whose helper modules it uses."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS / "endings"), str(_TESTS), str(_TESTS / "reliability"), str(_TESTS / "server")]
