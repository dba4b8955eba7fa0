"""Puts this folder on the path, for its helper modules: ``--import-mode=importlib`` does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# And the store with trouble, which is measured with there.
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
