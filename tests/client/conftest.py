"""Puts this folder and the server's on the path, for their helper modules: ``--import-mode=importlib`` does not."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "server")]
