"""Puts this folder on the path, for its helper module: ``--import-mode=importlib`` does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
